"""For the GPU scripts: which GPU they may use, and what their results say of the machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from mps_trainer.mps.nvml import GpuFacts, read_nvml

SCRIPTS = Path(__file__).parent
# Another device is for trying the scripts out where there is no GPU.
DEVICE = os.environ.get("GPU_LAB_DEVICE", "cuda:0")
# On a machine with several GPUs: the one to use, by NVML's index; the others are somebody else's.
ONLY_GPU = os.environ.get("GPU_LAB_GPU", "")
LARGE = 64 if DEVICE == "cpu" else 8192


def machine() -> dict[str, str]:
    """What a result is worth nothing without."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    facts = {
        "gpu": ", ".join(
            _text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)))
            for i in range(pynvml.nvmlDeviceGetCount())
        ),
        "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
    pynvml.nvmlShutdown()
    return facts


def gpu_uuids() -> list[str]:
    """Full UUIDs in NVML's order; the one of $GPU_LAB_GPU alone where that is set."""
    import pynvml

    pynvml.nvmlInit()
    found = [
        _text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)))
        for i in range(pynvml.nvmlDeviceGetCount())
    ]
    pynvml.nvmlShutdown()
    return [found[int(ONLY_GPU)]] if ONLY_GPU else found


def lab_gpus() -> list[GpuFacts]:
    """What NVML says of the GPUs that these scripts may use."""
    found = list(read_nvml().gpus)
    return [found[int(ONLY_GPU)]] if ONLY_GPU else found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

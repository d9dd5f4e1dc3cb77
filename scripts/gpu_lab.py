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
    import torch

    facts = read_nvml()
    return {
        "gpu": ", ".join(gpu.name for gpu in facts.gpus),
        "driver": facts.driver,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }


def lab_gpus() -> list[GpuFacts]:
    """What NVML says of the GPUs that these scripts may use, in its order."""
    found = list(read_nvml().gpus)
    return [found[int(ONLY_GPU)]] if ONLY_GPU else found


def gpu_uuids() -> list[str]:
    """Their UUIDs; RuntimeError when there is none."""
    found = [gpu.uuid for gpu in lab_gpus()]
    if not found:
        raise RuntimeError(f"no GPU: {read_nvml().missing or 'NVML sees none'}")
    return found

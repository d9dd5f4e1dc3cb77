"""What a run ran on, for its report: `machine.json` in the run folder."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mps_trainer.config import format_size
from mps_trainer.launcher.gpu import read_gpus
from mps_trainer.run.host_memory import read_memory

_PACKAGES = ("mps-trainer", "torch", "trinity-rft", "vllm", "ray", "pyarrow", "numpy")


def machine_facts() -> dict[str, str | list[str]]:
    """Host, processor, memory, GPUs, kernel, versions; as texts."""
    memory, _ = read_memory()
    gpus = [f"{gpu.name}, {format_size(gpu.total)}" for gpu in read_gpus().gpus]
    return {
        "host": platform.node(),
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores for us",
        "memory": format_size(memory),
        "GPUs": gpus or ["none"],
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "packages": [f"{name} {found}" for name in _PACKAGES if (found := installed_version(name))],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def installed_version(package: str) -> str:
    """Its version; "" when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

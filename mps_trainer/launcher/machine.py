"""What this machine has: GPUs, memory, /dev/shm. Read once, then judged by `plan.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mps_trainer.launcher.gpu import GpuReading, read_gpus
from mps_trainer.launcher.shm_objects import SHM
from mps_trainer.mps.checks import read_surroundings, run_checks


@dataclass(frozen=True)
class Machine:
    """One reading of this machine; sizes in bytes.

    Attributes:
        mps_problems: ("cuda:<n>", or what it is about, and what rules MPS out there).
    """

    memory_total: int
    memory_free: int
    shm_total: int
    shm_free: int
    gpu: GpuReading = field(default_factory=GpuReading)
    mps_problems: tuple[tuple[str, str], ...] = ()


def read_machine() -> Machine:
    """Read this machine."""
    total, free = read_memory()
    shm = os.statvfs(SHM)
    gpu = read_gpus()
    return Machine(
        memory_total=total,
        memory_free=free,
        shm_total=shm.f_frsize * shm.f_blocks,
        shm_free=shm.f_frsize * shm.f_bavail,
        gpu=gpu,
        mps_problems=_mps_problems() if gpu.gpus else (),
    )


def read_memory() -> tuple[int, int]:
    """Bytes of memory that there are, and that are free; a container's own limit counts."""
    memory = psutil.virtual_memory()
    limit, used = _cgroup_memory()
    if not limit:
        return memory.total, memory.available
    return min(memory.total, limit), min(memory.available, max(limit - used, 0))


def _mps_problems() -> tuple[tuple[str, str], ...]:
    return tuple((c.name, c.found) for c in run_checks(read_surroundings()) if c.level == "problem")


def _cgroup_memory() -> tuple[int, int]:
    """Limit and use of this container; (0, 0) when there is no limit."""
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_path).read_text().strip(), Path(used_path).read_text().strip()
        except (FileNotFoundError, PermissionError):
            continue
        # Version 1 writes "no limit" as a number near 2**63.
        if limit.isdigit() and int(limit) < 2**60:
            return int(limit), int(used)
    return 0, 0

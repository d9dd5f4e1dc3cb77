"""What this machine has: GPUs, memory, /dev/shm. Read once, then judged by `plan.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from mps_trainer.launcher.gpu import GpuReading, read_gpus
from mps_trainer.launcher.shm_objects import SHM
from mps_trainer.mps.checks import read_surroundings, run_checks
from mps_trainer.run.host_memory import read_memory


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


def _mps_problems() -> tuple[tuple[str, str], ...]:
    return tuple((c.name, c.found) for c in run_checks(read_surroundings()) if c.level == "problem")

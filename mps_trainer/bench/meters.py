"""What a window took: seconds, training steps, CPU time and memory of both sides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import psutil

from mps_trainer.bench.processes import process_tree
from mps_trainer.bench.trainers import Trainer
from mps_trainer.mps.nvml import read_nvml


class Meter:
    """Runs from its making to `read`.

    Args:
        engine: PID of the engine; 0 for none.
        trainer_pids: PIDs of the trainer.
    """

    def __init__(self, engine: int, trainer_pids: Sequence[int], trainer: Trainer | None) -> None:
        self._engine = [engine] if engine else []
        self._trainer_pids, self._trainer = list(trainer_pids), trainer
        self._cpu = self._read_cpu()
        self._steps = trainer.steps() if trainer is not None else 0
        self._begin = time.monotonic()

    def read(self) -> dict[str, Any]:
        """seconds; steps; cpu_s and memory_bytes by side."""
        seconds = time.monotonic() - self._begin
        steps = (self._trainer.steps() if self._trainer is not None else 0) - self._steps
        after = self._read_cpu()
        return {
            "seconds": seconds, "steps": steps,
            "cpu_s": {side: round(after[side] - self._cpu[side], 3) for side in after},
            "memory_bytes": {"engine": memory_of(self._engine), "trainer": memory_of(self._trainer_pids)},
        }  # fmt: skip

    def _read_cpu(self) -> dict[str, float]:
        own = psutil.Process().cpu_times()
        return {
            "engine": cpu_of(self._engine), "trainer": cpu_of(self._trainer_pids),
            # The thread that feeds the trainer stands for the operator; the rest of this process waits.
            "feed": own.user + own.system,
        }  # fmt: skip


def cpu_of(pids: Sequence[int]) -> float:
    """Seconds of CPU time that these processes and their descendants have used."""
    return sum(_cpu(process) for process in process_tree(pids))


def memory_of(pids: Sequence[int]) -> dict[str, int]:
    """Resident bytes, and bytes on GPUs by NVML (0 without a GPU)."""
    processes = process_tree(pids)
    resident = sum(_resident(process) for process in processes)
    mine = {process.pid for process in processes}
    on_gpu = sum(p.used for gpu in read_nvml().gpus for p in gpu.processes if p.pid in mine)
    return {"resident": resident, "gpu": on_gpu}


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0

"""One run per physical GPU: a lock by UUID, which the kernel drops when its holder dies."""

from __future__ import annotations

import os

from mps_trainer.errors import AlreadyRunningError
from mps_trainer.run import HeldLock, holder_note, state_dir, try_hold


def take_gpu(gpu_uuid: str, run_id: str) -> HeldLock:
    """Hold the GPU for `run_id` until the lock is released or the process ends.

    Raises:
        AlreadyRunningError: another run of this user has it; the message names that run.
    """
    folder = state_dir() / "gpus"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{gpu_uuid}.lock"
    lock = try_hold(path, f"run {run_id}, pid {os.getpid()}")
    if lock is None:
        raise AlreadyRunningError(
            f"GPU {gpu_uuid} is taken by {holder_note(path) or 'another run'}",
            "end that run (`mps-trainer down`), or name another GPU with device: cuda:<n>",
        )
    return lock

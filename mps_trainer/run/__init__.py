"""One run: its record, its locks and what its sidecar says of itself."""

from mps_trainer.run.locks import HeldLock, holder_note, is_held, try_hold
from mps_trainer.run.record import (
    STATE_DIR_VARIABLE,
    RunPaths,
    RunRecord,
    boot_id,
    find_by_namespace,
    host_name,
    is_run_alive,
    live_runs,
    new_run_id,
    run_paths,
    state_dir,
    this_host,
)
from mps_trainer.run.status import State, Status

__all__ = [
    "STATE_DIR_VARIABLE",
    "HeldLock",
    "RunPaths",
    "RunRecord",
    "State",
    "Status",
    "boot_id",
    "find_by_namespace",
    "holder_note",
    "host_name",
    "is_held",
    "is_run_alive",
    "live_runs",
    "new_run_id",
    "run_paths",
    "state_dir",
    "this_host",
    "try_hold",
]

"""Find, describe and end the runs of this user."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.errors import RunError
from mps_trainer.launcher.leftovers import remove_leftovers
from mps_trainer.launcher.process import Ended, stop_identity
from mps_trainer.launcher.run_locks import Holder
from mps_trainer.run import RunPaths, RunRecord, Status, is_held, live_runs
from mps_trainer.run.process import ProcessIdentity

# The supervisor waits 30 s for a sidecar that it starts only to drain, and 30 s for the drain; this is a little more.
DOWN_SECONDS = 75.0
_POLL_S = 0.05


@dataclass(frozen=True)
class RunView:
    """One live run.

    Attributes:
        status: None while the sidecar has not written one.
        supervisor: None when only the sidecar lives, which then ends by itself.
    """

    record: RunRecord
    paths: RunPaths
    status: Status | None
    supervisor: ProcessIdentity | None


@dataclass(frozen=True)
class EndedRun:
    """A run that `down` ended, or tried to."""

    run_id: str
    config: str
    run_dir: str
    how: Ended


def list_runs() -> list[RunView]:
    """All live runs of this user."""
    return [_view(paths, record) for paths, record in live_runs()]


def select_runs(what: str | None) -> list[RunView]:
    """The live runs meant by a run id or the path of a config; None means all.

    RunError when a named run does not live; no run at all is an empty list for None.
    """
    runs = list_runs()
    if what is None:
        return runs
    path = os.path.realpath(what)
    chosen = [
        run
        for run in runs
        if run.record.run_id == what or path in map(os.path.realpath, (run.record.config, run.record.derived_config))
    ]
    if not chosen:
        there = ", ".join(f"{run.record.run_id} ({run.record.config})" for run in runs) or "none"
        raise RunError(f"no live run {what!r}; live runs: {there}", "see `mps-trainer status`")
    return chosen


def end_runs(
    runs: list[RunView], *, timeout_s: float = DOWN_SECONDS, progress: Callable[[str], None] = lambda _: None
) -> list[EndedRun]:
    """Ask the supervisors to end and wait until their runs are over, at most `timeout_s` for each."""
    ended = []
    for run in runs:
        progress(f"ending run {run.record.run_id}: the sidecar takes what is in the rings and saves a checkpoint")
        ended.append(EndedRun(run.record.run_id, run.record.config, run.record.run_dir, _end(run, timeout_s)))
    remove_leftovers()
    return ended


def _end(run: RunView, timeout_s: float) -> Ended:
    deadline = time.monotonic() + timeout_s
    how = Ended.BY_ITSELF
    if run.supervisor is not None:
        how = stop_identity(run.supervisor, grace_s=timeout_s)
    # Without a supervisor the sidecar notices and ends; there is no process handle to wait on, only its lock.
    while is_held(run.paths.supervisor_lock) or is_held(run.paths.sidecar_lock):
        if time.monotonic() > deadline:
            return Ended.STILL_ALIVE
        time.sleep(_POLL_S)
    return how


def _view(paths: RunPaths, record: RunRecord) -> RunView:
    try:
        status = Status.load(Path(record.run_dir), paths.spare_status)
    except RunError:
        status = None
    holder = Holder.of(paths.supervisor_lock) if is_held(paths.supervisor_lock) else None
    return RunView(record, paths, status, holder.process if holder else None)

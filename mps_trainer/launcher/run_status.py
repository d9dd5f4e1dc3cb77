"""The supervisor's hand on `status.json`: what it says after a death, when no sidecar can."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from mps_trainer.run import RunRecord, State, Status, run_paths

log = logging.getLogger("mps_trainer.supervisor")


class RunStatus:
    """One run's status between two lives and after the last."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._run_dir = Path(record.run_dir)
        self._spare = run_paths(record.run_id).spare_status

    def load(self) -> Status | None:
        """What stands there; None when there is none or it is damaged."""
        return Status.peek(self._run_dir, self._spare)

    @property
    def has_stopped(self) -> bool:
        """Whether the sidecar itself said that it has saved everything and ended."""
        status = self.load()
        return status is not None and status.state is State.STOPPED

    def save(self, state: State, error: str, *, restarts: int, last_death: str = "") -> None:
        """Replace the state and keep the counters; "" keeps the last death. A disk that refuses costs the word only."""
        status = self.load() or Status(run_id=self._record.run_id, device=self._record.device)
        status = replace(status, state=state, pid=0, restarts=restarts, error=error)
        status.last_death = last_death or status.last_death
        try:
            status.save(self._run_dir, self._spare)
        except OSError as problem:
            # A full disk is no reason to leave a sidecar and a daemon without their supervisor.
            log.error("status.json does not say %s (%s): %s", state.value, status.error, problem)

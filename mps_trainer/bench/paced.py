"""How a paced sidecar is fed: it takes records before it trains on them, so nothing else would hold a feed back.

Few records are owed their steps at any time: a rollout has no more experiences than that, and more would be skipped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from mps_trainer.errors import RunError
from mps_trainer.run import Status

#: Records whose steps may be owed; the sidecar skips above eight batches.
_OWED_RECORDS = 4
_LOOK_S = 0.005


class PacedFeed:
    """Counts what was sent against the steps that were taken.

    Args:
        steps: training steps that fall due with each record.
        taken: training steps so far.
    """

    def __init__(self, run_dir: Path, steps: int, taken: Callable[[], int]) -> None:
        self._run_dir, self._steps, self._taken = run_dir, steps, taken
        self._from, self._sent, self._paused_at = 0, 0, 0.0

    def resume(self) -> None:
        """Nothing is owed now."""
        self._from, self._sent = self._taken(), 0

    def paused(self) -> None:
        """No record comes any more."""
        self._paused_at = time.time()

    def wait(self, alive: Callable[[], bool]) -> None:
        """Until another record may be sent; RunError when the sidecar has ended."""
        never = threading.Event()
        while self._sent * self._steps - (self._taken() - self._from) >= _OWED_RECORDS * self._steps:
            if not alive():
                raise RunError("the sidecar has ended", f"see {self._run_dir}/sidecar.log")
            never.wait(_LOOK_S)
        self._sent += 1

    def owes(self) -> bool:
        """Whether steps are due after a pause, as far as the sidecar has said."""
        status = Status.peek(self._run_dir)
        return status is None or status.updated < self._paused_at or status.steps_owed > 0

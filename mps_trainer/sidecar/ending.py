"""Why and when the sidecar ends: a signal, the supervisor's death, or nobody left to serve."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from mps_trainer.run import RunPaths, is_held


class Ending:
    """Collects reasons to end; the loop asks for the first one.

    Attributes:
        reason: a sentence for the log, or "" while there is none.
        orphaned: the supervisor is gone, so nobody else will clean up.
    """

    def __init__(self, paths: RunPaths, idle_timeout_s: float) -> None:
        self.reason = ""
        self.orphaned = False
        self._paths = paths
        self._idle_timeout_s = idle_timeout_s
        self._last_alive = time.monotonic()
        self._wake: Callable[[], object] = lambda: None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wake_with(self, wake: Callable[[], object]) -> None:
        """Call `wake` when a signal arrives, so that a wait ends at once."""
        self._wake = wake

    def operator_seen(self) -> None:
        """An operator lives, or the sidecar has just become ready: the idle time starts again."""
        self._last_alive = time.monotonic()

    def check(self) -> bool:
        """Whether there is a reason to end."""
        if not is_held(self._paths.supervisor_lock):
            self.orphaned = True
            self.reason = self.reason or "the supervisor is gone (its lock has dropped)"
        elif time.monotonic() - self._last_alive > self._idle_timeout_s:
            self.reason = self.reason or f"no operator for {self._idle_timeout_s:g} s (idle_timeout)"
        return bool(self.reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or f"asked to end by {signal.Signals(number).name}"
        self._wake()

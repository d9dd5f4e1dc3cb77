"""Why and when the sidecar ends: a signal, the supervisor's death, or nobody left to serve."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from mps_trainer.run import RunPaths, is_held

#: Loading a large model before the first operator comes can take this long, whatever idle_timeout says.
FIRST_OPERATOR_S = 1800.0


class Ending:
    """Collects reasons to end; the loop asks for the first one.

    Idle time ends only a sidecar that `up` started: one that `mps-trainer run` owns ends with its run.

    Attributes:
        reason: a sentence for the log, or "" while there is none.
        orphaned: the supervisor is gone, so nobody else will clean up.
    """

    def __init__(self, paths: RunPaths, idle_timeout_s: float, *, owned: bool = False) -> None:
        self.reason = ""
        self.orphaned = False
        self._paths = paths
        self._idle_timeout_s = idle_timeout_s
        self._may_idle = not owned
        self._patience_s = max(idle_timeout_s, FIRST_OPERATOR_S)
        self._last_alive = time.monotonic()
        self._wake: Callable[[], object] = lambda: None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wake_with(self, wake: Callable[[], object]) -> None:
        """Call `wake` when a signal arrives, so that a wait ends at once."""
        self._wake = wake

    def operator_seen(self) -> None:
        """An operator lives: the idle time starts again."""
        self._last_alive = time.monotonic()
        self._patience_s = self._idle_timeout_s

    def is_asked(self) -> bool:
        """Whether a signal came or the supervisor is gone. Cheap: asked after every training step."""
        if not is_held(self._paths.supervisor_lock):
            self.orphaned = True
            self.reason = self.reason or "the supervisor is gone (its lock has dropped)"
        return bool(self.reason)

    def check(self) -> bool:
        """Whether there is a reason to end; idling is one too, so ask only where operators were looked for."""
        if not self.is_asked() and self._may_idle and time.monotonic() - self._last_alive > self._patience_s:
            self.reason = f"no operator for {self._patience_s:g} s (idle_timeout)"
        return bool(self.reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or f"asked to end by {signal.Signals(number).name}"
        self._wake()

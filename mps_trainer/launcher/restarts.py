"""How often a killed sidecar is started again, and how long the supervisor waits before it."""

from __future__ import annotations

import math
import time

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
# A life that lasts this long after READY (or warm) shows that the sidecar can work; what came before no longer counts.
_HEALTHY_S = 600.0


class RestartBudget:
    """Counts restarts.

    Attributes:
        total: over the whole run, for the status.
        in_a_row: since the last healthy life; more than `limit` of them end the run.
        was_warm: whether any life got as far as waiting for an engine.
        was_ready: whether any life got as far as READY; before that a death is a failed start.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.in_a_row = 0
        self.was_warm = False
        self.was_ready = False
        self._ready_since = math.inf

    def note_start(self) -> None:
        """A life begins."""
        self._ready_since = math.inf

    def note_waiting(self) -> None:
        """The sidecar is warm; its health counts from here, and it has not been ready."""
        self.was_warm = True
        self._ready_since = time.monotonic()

    def note_ready(self) -> None:
        """The sidecar is ready."""
        self.was_ready = True
        self._ready_since = time.monotonic()

    def count(self) -> float:
        """Count a restart; the seconds to wait before it, doubling from half a second."""
        if time.monotonic() - self._ready_since >= _HEALTHY_S:
            self.in_a_row = 0
        self.total += 1
        self.in_a_row += 1
        return float(min(_FIRST_BACKOFF_S * 2 ** (self.in_a_row - 1), _LONGEST_BACKOFF_S))

    @property
    def is_spent(self) -> bool:
        """Whether the last count was one too many."""
        return self.in_a_row > self.limit

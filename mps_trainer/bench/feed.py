"""The thread that gives a trainer its records, and waits with a limit."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

from mps_trainer.columns import Rows
from mps_trainer.errors import RunError, TransportError

SCORE_TIMEOUT_S = 120.0
_LOOK_S = 0.02
_END_S = 5.0
#: Of records, one in so many asks for scores too.
SCORE_EVERY = 4


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    """RunError when `condition()` is not true in time."""
    deadline, never = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise RunError(f"not within {timeout_s:.0f} s: {what}", "see the logs in the folder of the benchmark")
        never.wait(_LOOK_S)


class Feed(threading.Thread):
    """Gives a trainer records without a pause while `going` is set.

    Args:
        send: takes a record; it blocks while the trainer has enough to do.
        ask: the same and waits for scores; the number of those that are not finite.
        hold: called before each.

    Attributes:
        over: it has ended with `error`.
    """

    def __init__(self, records: Iterator[Rows], send: Any, ask: Any, hold: Any = lambda: None) -> None:
        super().__init__(daemon=True, name="feed")
        self.going, self.idle = threading.Event(), threading.Event()
        self.score_ms: list[float] = []
        self.error, self.sent = "", 0
        self._records, self._send, self._ask, self._hold = records, send, ask, hold
        self._ended = False
        self.over = False
        self.idle.set()

    def run(self) -> None:
        """The thread."""
        for number in itertools.count():
            if not self.going.is_set():
                self.idle.set()
                self.going.wait()
            if self._ended:
                return
            try:
                self._give(next(self._records), with_scores=number % SCORE_EVERY == 0)
            except (TransportError, RunError, OSError) as error:
                self.error = self.error or f"{type(error).__name__}: {error}"
                self.over = True
                self.idle.set()
                return

    def resume(self) -> None:
        """Let experiences come; RunError when it has ended with an error, for nobody would ever say that it rests."""
        self.score_ms = []
        self.idle.clear()
        self.going.set()
        if self.over:
            self.idle.set()
            raise RunError(self.error, "see the logs in the folder of the benchmark")

    def pause(self, timeout_s: float = SCORE_TIMEOUT_S) -> None:
        """Let none come, and wait until it is at rest."""
        self.going.clear()
        if not self.idle.wait(timeout_s):
            raise RunError(f"the feed did not come to rest in {timeout_s:.0f} s", "the trainer takes no records")

    def end(self) -> bool:
        """End it after the record that it gives now; False when that one waits for what may have to be ended first."""
        return self._end(_END_S)

    def close(self) -> None:
        """End it, and wait as long as a record may take."""
        self._end(SCORE_TIMEOUT_S)

    def _end(self, timeout_s: float) -> bool:
        self._ended = True
        self.going.set()
        if self.is_alive():
            self.join(timeout_s)
        return not self.is_alive()

    def _give(self, rows: Rows, *, with_scores: bool) -> None:
        self._hold()
        if not with_scores:
            self._send(rows)
        else:
            begin = time.monotonic()
            bad = self._ask(rows)
            self.score_ms.append(round(1e3 * (time.monotonic() - begin), 3))
            if bad:
                self.error = f"{bad} scores are not finite"
        self.sent += 1

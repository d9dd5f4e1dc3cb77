"""What the supervisor sleeps on: signals, one pipe, a nudge from another thread, its owner's lock."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path

from mps_trainer.run import is_held

_CHECK_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_early: list[int] = []


def listen_early() -> None:
    """Keep signals for the `Wakeups` that follow, where this process would just end of them."""
    _early.clear()
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: _early.append(number))


class Wakeups:
    """Sleeps without missing a signal, and remembers that the run shall end.

    Args:
        owner_lock: whose drop ends the run; "" when nobody owns it.
        look: called after each sleep, twice a second at least.
        why_end: the same; a sentence is a reason to end.

    Attributes:
        asked_to_end: why the run shall end, a sentence; "" while it shall not.
    """

    def __init__(self, owner_lock: str, look: Callable[[], object], why_end: Callable[[], str] = lambda: "") -> None:
        self.asked_to_end = ""
        self._owner_lock = Path(owner_lock) if owner_lock else None
        self._look = look
        self._why_end = why_end
        self._selector = selectors.DefaultSelector()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._selector.register(self._reading, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._writing)
        for number in _SIGNALS:
            signal.signal(number, self._note_signal)
        for early in _early:
            self._note_signal(early, None)
            self.wake()
        # A handler is needed for the wake-up; the death itself is read from the child.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def wake(self) -> None:
        """End a sleep from another thread."""
        # A full pipe wakes as well as one byte more.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, b"\0")

    def ask_to_end(self, why: str) -> None:
        """The run shall end; the first reason stays."""
        self.asked_to_end = self.asked_to_end or why

    def sleep(self, timeout_s: float = _CHECK_S, descriptor: int = -1) -> bool:
        """Sleep until a signal, a nudge, `descriptor` or the time is up; whether `descriptor` is readable."""
        if descriptor >= 0:
            self._selector.register(descriptor, selectors.EVENT_READ)
        try:
            ready = [key.fd for key, _ in self._selector.select(min(timeout_s, _CHECK_S))]
        finally:
            if descriptor >= 0:
                self._selector.unregister(descriptor)
        if self._reading in ready:
            os.read(self._reading, 4096)
        if self._owner_lock is not None and not is_held(self._owner_lock):
            self.ask_to_end("the process that owns the run is gone")
        if why := self._why_end():
            self.ask_to_end(why)
        self._look()
        return descriptor in ready

    def pause(self, seconds: float) -> bool:
        """Sleep for `seconds`; True, and sooner, when the run shall end instead."""
        return self.wait(seconds, lambda: bool(self.asked_to_end))

    def wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Sleep until the condition holds, at most `seconds`, even when the run shall end; whether it holds."""
        end = time.monotonic() + seconds
        while not until():
            if (left := end - time.monotonic()) <= 0:
                return False
            self.sleep(left)
        return True

    def _note_signal(self, number: int, _frame: object) -> None:
        by = ", as `mps-trainer down` does" if number == signal.SIGTERM else ""
        self.ask_to_end(f"asked with {signal.Signals(number).name}{by}")

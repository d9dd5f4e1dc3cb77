"""A pipe that a signal writes to, so that a wait in a selector ends at once."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable


def wakeup_pipe() -> tuple[int, int]:
    """(reading end, writing end), both non-blocking; from now on every handled signal writes to it.

    SIGCHLD is handled, so that a child's death wakes too, and SIGHUP is ignored.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    # A handler is needed for the wake-up; the death itself is read from the child.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return reading, writing


def sleeper(selector: selectors.BaseSelector, wait: Callable[[float, int], bool]) -> Callable[..., bool]:
    """`sleep(timeout_s, descriptor=-1)`: `wait`, with the descriptor in its selector for that time."""

    def sleep(timeout_s: float, descriptor: int = -1) -> bool:
        if descriptor < 0:
            return wait(timeout_s, descriptor)
        selector.register(descriptor, selectors.EVENT_READ)
        try:
            return wait(timeout_s, descriptor)
        finally:
            selector.unregister(descriptor)

    return sleep

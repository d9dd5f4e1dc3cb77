"""`mps-trainer down` while `up` is still starting: for a moment `up` itself holds the locks, and gets the signal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from mps_trainer.errors import RunError


class CalledOff:
    """As a context: SIGTERM is a RunError, once. A caller with a handler of its own (`mps-trainer run`) keeps that."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._is_ours = False
        self._holds = False
        self._asked = False

    def __enter__(self) -> CalledOff:
        in_main = threading.current_thread() is threading.main_thread()
        self._is_ours = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._is_ours:
            signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """A signal within it counts at its end: what it starts has to be known to whoever ends it."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
        if self._asked:
            self._raise()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # The clean-up that follows must not be called off too.
        signal.signal(number, signal.SIG_IGN)
        self._asked = True
        if not self._holds:
            self._raise()

    def _raise(self) -> None:
        raise RunError(
            f"run {self._run_id} was ended before it was ready: asked with SIGTERM, as `mps-trainer down` does",
            "start it again",
        )

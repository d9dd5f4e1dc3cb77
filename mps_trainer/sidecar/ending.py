"""Why and when the sidecar ends: a signal, the supervisor's death, or nobody left to serve.

A signal before the loop ends the process at once, for the task may hang where nobody looks at a flag, and nothing has
been learned yet. From `Ending.listen` on a signal is a reason, at which the loop saves everything.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType

from mps_trainer.run import RunPaths, State, is_held
from mps_trainer.run.exit_codes import OK
from mps_trainer.sidecar.own_files import OwnFiles

#: Loading a large model before the first operator comes can take this long, whatever idle_timeout says.
FIRST_OPERATOR_S = 1800.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class EarlyEnd:
    """SIGTERM or SIGINT ends the process at once: STOPPED, exit code 0, when no life of the run was READY before.

    A successor may have been asked to end before it took what its predecessor left. That is no end in order, so the
    exit code is that of the signal, and the supervisor says so.

    Attributes:
        synchronise: called first, within the signal handler; a client of MPS waits for its GPU there.
    """

    def __init__(self, own: OwnFiles, *, successor: bool) -> None:
        self.synchronise: Callable[[], object] = lambda: None
        self._successor = successor
        self._own = own
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        code = 128 + number
        try:
            # Not through logging: the signal may have come amid a write of its own.
            os.write(2, f"asked to end by {signal.Signals(number).name} before READY\n".encode())
            self.synchronise()
            if not self._successor:
                self._own.status.state = State.STOPPED
                self._own.save_at_end()
                code = OK
        finally:
            # No SystemExit: a task's code is on the stack, which may catch it.
            os._exit(code)


def forget_signals() -> None:
    """For a forked child: what ends it by a signal must not be the sidecar's business."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


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

    def listen(self, wake: Callable[[], object]) -> None:
        """From now on a signal is a reason to end; `wake` is called at it, so that a wait ends at once."""
        self._wake = wake
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def wait_for_go(self, descriptor: int) -> bool:
        """Wait, warm, until the supervisor says on which GPU; False when there is a reason to end instead.

        Nobody has been served, so the time without an engine counts as idle time; afterwards it starts again.
        """
        limit_s = self._patience_s if self._may_idle else None
        readable, _, _ = select.select([descriptor], [], [], limit_s)
        if not readable:
            self.reason = f"no rollout engine for {limit_s:g} s (idle_timeout)"
        elif not os.read(descriptor, 1):
            self.orphaned = True
            self.reason = "the supervisor is gone (its pipe has closed)"
        os.close(descriptor)
        self._last_alive = time.monotonic()
        return not self.reason

    def operator_seen(self) -> None:
        """An operator lives: the idle time starts again."""
        self._last_alive = time.monotonic()
        self._patience_s = self._idle_timeout_s

    def engine_seen(self) -> None:
        """An engine that joined is starting: the idle time starts again, and its operator gets what time it had."""
        self._last_alive = time.monotonic()

    def is_asked(self) -> bool:
        """Whether a signal came or the supervisor is gone. Cheap: asked after every training step."""
        if not is_held(self._paths.supervisor_lock):
            self.orphaned = True
            self.reason = self.reason or "the supervisor is gone (its lock has dropped)"
        return bool(self.reason)

    @property
    def is_of_the_run(self) -> bool:
        """Whether no sidecar follows, as far as is known: then nobody will read what dead operators left."""
        return self.orphaned or not self._paths.successor_file.exists()

    def check(self) -> bool:
        """Whether there is a reason to end; idling is one too, so ask only where operators were looked for."""
        if not self.is_asked() and self._may_idle and time.monotonic() - self._last_alive > self._patience_s:
            self.reason = f"no operator for {self._patience_s:g} s (idle_timeout)"
        return bool(self.reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or f"asked to end by {signal.Signals(number).name}"
        self._wake()

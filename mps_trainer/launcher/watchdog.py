"""Notices a sidecar that hangs: its beat in the file `doing` stands still although it runs.

The sidecar beats between records and steps and while it waits. Time counts only while we look: a machine that was
suspended, or a container that was frozen, ages nobody. A sidecar that somebody stopped is left to whoever did it.

What is in work is read when the hang is found: one that is only slow begins to drain when it is asked to end, and is in
other experiences then. That it goes on at all proves that it was slow: it gets its whole grace, and nobody is blamed.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from pathlib import Path

from mps_trainer.run.doing import Doing, read_beat, read_doing
from mps_trainer.run.process import ProcessIdentity

log = logging.getLogger("mps_trainer.supervisor")

_LONGEST_LOOK_S = 1.0
_DUMP_S = 1.0
#: For a hung sidecar between SIGTERM and the harder ways: whatever hangs does not look at a flag.
HUNG_GRACE_S = 5.0


class Watchdog:
    """Watches one sidecar after another.

    Args:
        limit_s: without a beat for so long it hangs; 0 never.

    Attributes:
        found: what the sidecar that is watched hangs in; None while it does not, to be reset when the next one starts.
    """

    def __init__(self, run_dir: Path, limit_s: float) -> None:
        self.found: Doing | None = None
        self._run_dir = run_dir
        self._limit_s = limit_s
        self._last: tuple[int, int | None] = (0, None)
        self._looked = self._silent_s = 0.0

    def look(self, child: subprocess.Popen[bytes], *, hold: bool = False) -> str:
        """ "" while all is well. Otherwise what hangs, once its Python stacks are in sidecar.log.

        Args:
            hold: do nothing now, however long it hangs: an engine is measuring memory.
        """
        now = time.monotonic()
        beat = read_beat(self._run_dir) if self._limit_s else None
        if beat is None or (child.pid, beat) != self._last:
            self.found = None
            self._last, self._looked, self._silent_s = (child.pid, beat), now, 0.0
            return ""
        self._silent_s += min(now - self._looked, _LONGEST_LOOK_S)
        self._looked = now
        if hold or self._silent_s < self._limit_s:
            return ""
        if _is_stopped(child.pid):
            # When it goes on it gets the whole time again.
            self._silent_s = 0.0
            return ""
        self._dump_stacks(child)
        doing = read_doing(self._run_dir)
        if doing is None or doing.beat_ns != beat:
            # It has gone on while we looked.
            return ""
        self.found = doing
        return f"it hung for {self._silent_s:.0f} s (hang_timeout); its stacks are in sidecar.log"

    def grace_s(self, usual_s: float) -> float:
        """How long to wait after SIGTERM."""
        return min(usual_s, HUNG_GRACE_S) if self.found else usual_s

    def more_s(self, usual_s: float) -> float:
        """What to add to `grace_s` once that is over: one that goes on is draining."""
        return usual_s - self.grace_s(usual_s) if self.was_only_slow else 0.0

    @property
    def was_only_slow(self) -> bool:
        """Whether the one that seemed to hang has gone on since: in another record, step or part of one."""
        return self.found is not None and read_beat(self._run_dir) not in (None, self.found.beat_ns)

    def _dump_stacks(self, child: subprocess.Popen[bytes]) -> None:
        path = self._run_dir / "sidecar.log"
        before = _size(path)
        # Its faulthandler answers in C, even while Python waits for a call that never returns.
        child.send_signal(signal.SIGUSR1)
        end = time.monotonic() + _DUMP_S
        while _size(path) == before and time.monotonic() < end:
            try:
                child.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            return
        log.warning("process %d hangs; its stacks are in %s", child.pid, path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        # Somebody has removed the log; the stacks are lost then, and no more than they.
        return 0


def _is_stopped(pid: int) -> bool:
    process = ProcessIdentity.of(pid)
    return process is not None and process.state in ("T", "t")

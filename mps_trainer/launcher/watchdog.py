"""Notices a sidecar that hangs: its beat in the file `doing` stands still although it runs.

The sidecar beats between records and steps and while it waits. Time counts only while we look: a machine that was
suspended, or a container that was frozen, ages nobody. A sidecar that somebody stopped is left to whoever did it.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from pathlib import Path

from mps_trainer.run.doing import read_beat

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
        found: whether the sidecar that is watched has hung; to be reset when the next one starts.
    """

    def __init__(self, run_dir: Path, limit_s: float) -> None:
        self.found = False
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
            self.found = False
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
        self.found = True
        self._dump_stacks(child)
        return f"it hung for {self._silent_s:.0f} s (hang_timeout); its stacks are in sidecar.log"

    def grace_s(self, usual_s: float) -> float:
        """How long to wait after SIGTERM."""
        return min(usual_s, HUNG_GRACE_S) if self.found else usual_s

    def _dump_stacks(self, child: subprocess.Popen[bytes]) -> None:
        path = self._run_dir / "sidecar.log"
        before = path.stat().st_size
        # Its faulthandler answers in C, even while Python waits for a call that never returns.
        child.send_signal(signal.SIGUSR1)
        end = time.monotonic() + _DUMP_S
        while path.stat().st_size == before and time.monotonic() < end:
            try:
                child.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            return
        log.warning("process %d hangs; its stacks are in %s", child.pid, path)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"

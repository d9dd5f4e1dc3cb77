"""For a run whose files in the state folder somebody removes while it lives (a clean-up of /tmp, `rm -r`).

The run file can be written again. A lock file cannot: operators, `down` and `up` look at the lock under its name, and
a second file of that name is a lock that nobody holds. So the run ends in order, and says why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from mps_trainer.launcher.run_folder import RunFolder
from mps_trainer.launcher.run_status import RunStatus
from mps_trainer.run import HeldLock, RunPaths, RunRecord, State

log = logging.getLogger("mps_trainer.supervisor")


class StateWatch:
    """Looks after one run's files in the state folder.

    Attributes:
        lost: why the run cannot go on, a sentence; "" while it can.
    """

    def __init__(self, record: RunRecord, paths: RunPaths, locks: Sequence[HeldLock]) -> None:
        self.lost = ""
        self._record = record
        self._paths = paths
        self._locks = locks
        self._could_restore = True
        self._folder = RunFolder(record)

    def look(self) -> str:
        """Restore the run file and the run folder if they are gone; `lost` if that would not help."""
        for lock in self._locks:
            if not self.lost and not _is_in_place(lock):
                self.lost = (
                    f"{lock.path} was removed while the run lived, so that nobody could see that it lives: the run "
                    "ended in order. Keep clean-ups away from that folder, or set MPS_TRAINER_STATE_DIR"
                )
                log.error("%s", self.lost)
        if not self.lost and not self._paths.run_file.exists():
            self._restore()
        self._folder.look()
        return self.lost

    def tell(self, status: RunStatus) -> None:
        """At the end: leave the reason in a status that says no other."""
        found = status.load()
        if self.lost and found is not None and found.state is State.STOPPED:
            status.save(State.STOPPED, self.lost, restarts=found.restarts)

    def _restore(self) -> None:
        try:
            self._record.save(self._paths.run_file)
        except OSError as error:
            if self._could_restore:
                log.error("%s was removed and cannot be written again: %s", self._paths.run_file, error)
            self._could_restore = False
        else:
            self._could_restore = True
            log.warning("%s was removed while the run lives: written again", self._paths.run_file)


def _is_in_place(lock: HeldLock) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), lock.path.lstat())
    except FileNotFoundError:
        return False

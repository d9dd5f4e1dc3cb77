"""What the sidecar writes of itself, on a disk that may refuse it: that is said once, and training goes on.

A full disk, a folder in place of a file, a lost right: none of it is the experiences' doing, and none is worth the run.
The journal alone is different (`journal.py`): a record that it refuses stays in its ring.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from mps_trainer.run import Status

_log = logging.getLogger(__name__)


class OwnFiles:
    """Keeps up `status.json`, and knows what cannot be written now (`Status.trouble`).

    Args:
        spare: where the status goes while `run_dir` refuses it.

    Attributes:
        saved_at: when that was tried last, on the monotonic clock.
    """

    def __init__(self, status: Status, run_dir: Path, spare: Path | None = None) -> None:
        self.status = status
        self.run_dir = run_dir
        self._spare = spare
        self._remembered = ""
        self.saved_at = 0.0
        self._troubles: dict[str, str] = {}

    def save_status(self) -> None:
        """Write the status as it is."""
        self.saved_at = time.monotonic()
        before = self.status.trouble
        try:
            self.status.save(self.run_dir, self._spare)
        except OSError as error:
            self.failed("status.json", error)
        else:
            self.works("status.json")
        if self.status.trouble != before:
            # What was written, here or in the spare place, does not say so yet.
            self.save_at_end()

    def save_at_end(self) -> None:
        """Write the status of a process that ends at once: no word to the log, where a signal may have come from."""
        with contextlib.suppress(OSError):
            self.status.save(self.run_dir, self._spare)

    def remember(self, what: str) -> None:
        """Say this in the status for the rest of this life."""
        self._remembered = what
        self._tell()

    def failed(self, what: str, error: Exception) -> None:
        """`what` cannot be written; logged when that is new."""
        if what not in self._troubles:
            _log.error("%s cannot be written, training goes on without: %s", what, error)
        # Without the name of a temporary file, which differs each time: the operator says a text once.
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        self._troubles[what] = f"{what} cannot be written: {reason}"
        self._tell()

    def works(self, what: str) -> None:
        """`what` was written."""
        if self._troubles.pop(what, None) is not None:
            _log.info("%s can be written again", what)
            self._tell()

    def _tell(self) -> None:
        self.status.trouble = "; ".join(filter(None, [self._remembered, *self._troubles.values()]))

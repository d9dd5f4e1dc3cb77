"""For a run whose folder is removed while the sidecar works: its files are opened anew, and all it has is saved again.

An open file outlives its name, so everything seems to work: records are journaled and steps taken, and nobody will ever
see any of it. So the sidecar looks, once a second, whether its journal is still where it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mps_trainer.run.made_again import OwnLog, make_again, was_removed
from mps_trainer.sidecar.journal import Journal
from mps_trainer.sidecar.metrics import MetricsLog
from mps_trainer.sidecar.noting import Note
from mps_trainer.sidecar.own_files import OwnFiles

_log = logging.getLogger(__name__)
_EVERY_S = 1.0
_WHAT = "the run folder"


class RunFolder:
    """Looks after the sidecar's files.

    Args:
        save: takes a checkpoint; only called between two records and two steps.
    """

    def __init__(
        self, own: OwnFiles, journal: Journal, metrics: MetricsLog, note: Note, save: Callable[[], object]
    ) -> None:
        self._own = own
        self._journal = journal
        self._metrics = metrics
        self._note = note
        self._save = save
        self._log = OwnLog(own.run_dir / "sidecar.log")
        self._looked_at = 0.0
        if said := was_removed(own.run_dir):
            own.remember(said)

    def look(self, *, at_once: bool = False) -> None:
        """Begin again if the files are gone; cheap, and without `at_once` no more than once a second."""
        now = time.monotonic()
        if now - self._looked_at < _EVERY_S and not at_once:
            return
        self._looked_at = now
        if not self._journal.is_in_place:
            self._begin_again()

    def _begin_again(self) -> None:
        try:
            said = make_again(self._own.run_dir)
            self._log.begin_again()
            lost = self._journal.begin_again()
            self._note.begin_again()
        except OSError as error:
            self._own.failed(_WHAT, error)
            return
        self._own.works(_WHAT)
        self._own.remember(said)
        _log.error("%s", said)
        if lost:
            _log.error("records in the journal had not been taken: they are lost")
        self._metrics.begin_again()
        # The journal was the memory of everything since the last checkpoint, and that is gone too.
        self._save()

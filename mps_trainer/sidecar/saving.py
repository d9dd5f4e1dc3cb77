"""When the sidecar saves a checkpoint, and what follows when the disk refuses it."""

from __future__ import annotations

from safetensors import SafetensorError

from mps_trainer.run.doing import Stage
from mps_trainer.sidecar.noting import Note
from mps_trainer.sidecar.own_files import OwnFiles
from mps_trainer.sidecar.startup import Learning

_MAX_JOURNAL_BYTES = 512 * 2**20


class Saving:
    """Saves every so many steps, and when the journal has grown large since the newest checkpoint.

    Args:
        every: training steps.
    """

    def __init__(self, learning: Learning, own: OwnFiles, note: Note, every: int) -> None:
        self._learning = learning
        self._own = own
        self._note = note
        self._every = every
        self._saved_at_step = self._tried_at_step = self._step
        self._large_from = _MAX_JOURNAL_BYTES

    @property
    def _step(self) -> int:
        return self._learning.learner.trainer.step

    def save_if_due(self, *, behind: bool) -> None:
        """Save if it is time. `behind`: the journal is being taken, and its size says nothing."""
        large = not behind and self._learning.journal.growth > self._large_from
        if large or self._step - self._tried_at_step >= self._every:
            self.save()

    def save_if_changed(self) -> None:
        """Save unless the newest checkpoint holds all there is."""
        if self._step != self._saved_at_step or self._learning.journal.growth:
            self.save()

    def save(self) -> None:
        """Save now. A disk that refuses is told in the status, and training goes on."""
        self._note.stage(Stage.SAVING)
        self._tried_at_step = self._step
        try:
            self._learning.save()
        except (OSError, SafetensorError) as error:
            # Nothing is lost: the journal still holds all that the checkpoint before it lacks.
            self._own.failed("a checkpoint", error)
            # Each try costs a whole checkpoint's work and a file of the journal.
            self._large_from = max(_MAX_JOURNAL_BYTES, self._learning.journal.growth + _MAX_JOURNAL_BYTES // 4)
        else:
            self._own.works("a checkpoint")
            self._large_from = _MAX_JOURNAL_BYTES
            self._saved_at_step = self._step

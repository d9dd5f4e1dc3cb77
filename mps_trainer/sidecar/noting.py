"""The sidecar's words for the file `doing` (`run/doing.py`): which record or step is in work."""

from __future__ import annotations

from pathlib import Path

from mps_trainer.columns import PackedBatch
from mps_trainer.run.doing import DoingFile, Stage
from mps_trainer.sidecar.learner import RecordName
from mps_trainer.sidecar.set_aside import reference


class Note:
    """Says what comes next, before it comes. A few microseconds a call.

    Args:
        batch_size: the most experiences in a step, all of which are named.
    """

    def __init__(self, run_dir: Path, batch_size: int) -> None:
        self._file = DoingFile(run_dir, batch_size)
        self.stage = self._file.stage
        self.beat = self._file.beat
        self.begin_again = self._file.open
        self.close = self._file.close

    @property
    def at(self) -> Stage:
        """What was said last."""
        return self._file.at

    def waiting(self) -> None:
        """Nothing is in work."""
        self._file.stage(Stage.WAITING)

    def record(self, stage: Stage, name: RecordName, batch: PackedBatch, step: int) -> None:
        """A record is in work; further stages of it need only `stage`."""
        self._begin(step, name, batch)
        self._file.stage(stage)

    def step(self, batch: PackedBatch, step: int) -> None:
        """A training step on these experiences begins."""
        self._begin(step, None, batch)
        self._file.stage(Stage.TRAINING)

    def _begin(self, step: int, name: RecordName | None, batch: PackedBatch) -> None:
        ids = batch["eid"]
        assert ids.offsets is not None
        self._file.begin(step, reference(name) if name else None, ids.offsets.tobytes(), ids.values.tobytes())

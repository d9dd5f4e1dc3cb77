"""`score_where: operator`: scores in the operator's thread, from the sidecar's snapshot of the weights.

The snapshot is taken before the batch is sent, so that the model has not been trained on what it scores. The model is
built once, before the first batch: how long that takes is the task's affair, and no batch waits for it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from mps_trainer.columns import Array, Column, Rows
from mps_trainer.errors import TaskError, TransportError

if TYPE_CHECKING:
    from mps_trainer.tasks import AuxiliaryTask
    from mps_trainer.tasks.snapshot_scorer import SnapshotScorer

logger = logging.getLogger(__name__)


class OwnModel:
    """The model in which an operator scores, for one run after the other. One that cannot be built is told later."""

    def __init__(self, task: AuxiliaryTask) -> None:
        # Torch is in the process since the task was loaded.
        from mps_trainer.tasks.snapshot_scorer import build_scoring_model

        self._task = task
        self._model: Any = None
        self.error: TaskError | None = None
        try:
            self._model = build_scoring_model(task)
        except TaskError as error:
            self.error = error

    def join(self, columns: tuple[Column, ...], run_id: str, batch_size: int) -> OwnScores:
        """Score from the weights of this run."""
        from mps_trainer.tasks.snapshot_scorer import SnapshotScorer

        return OwnScores(SnapshotScorer(self._task, columns, run_id, batch_size, self._model), self.error)


class OwnScores:
    """The operator's own scorer of one run. Not thread-safe."""

    def __init__(self, scorer: SnapshotScorer, error: TaskError | None = None) -> None:
        self._scorer = scorer
        self._error = error
        self._num_errors = 0

    @property
    def version(self) -> int:
        """Of the model that scores; -1 when there is none yet."""
        return self._scorer.version

    @property
    def trained_ns(self) -> int:
        """CLOCK_MONOTONIC when that model last took a training step."""
        return self._scorer.trained_ns

    def refresh(self, deadline: float) -> dict[str, int | float]:
        """Take the newest snapshot. One that cannot be read by `deadline` (monotonic seconds) or that the sidecar
        overtakes is counted, and the weights before it stay in use.

        Raises TaskError when the task's model cannot be built here or does not fit.
        """
        if self._error is not None:
            raise TaskError(self._error.message, self._error.todo)
        begin = time.monotonic()
        try:
            self._scorer.refresh(deadline, tries=1)
        except TransportError as error:
            self._num_errors += 1
            if self._num_errors == 1:
                logger.warning("mps_trainer: the snapshot of the weights cannot be read: %s", error)
        return {"snapshot_ms": (time.monotonic() - begin) * 1e3, "snapshot_errors_total": self._num_errors}

    def scores(self, rows: Rows, deadline: float) -> Array | None:
        """(n,) float32 for the n rows, NaN for what was not reached by `deadline`; None before the first snapshot."""
        return self._scorer.score(rows, deadline) if self._scorer.has_weights else None

    def close(self) -> None:
        """Leave the snapshot to others."""
        self._scorer.close()

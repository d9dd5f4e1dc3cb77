"""`score_where: operator`: scores in the operator's thread, from the sidecar's snapshot of the weights.

The snapshot is taken before the batch is sent, so that the model has not been trained on what it scores.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from mps_trainer.columns import Array, Column, Rows
from mps_trainer.errors import TransportError

if TYPE_CHECKING:
    from mps_trainer.tasks import AuxiliaryTask

logger = logging.getLogger(__name__)


class OwnScores:
    """The operator's own scorer of one run. Not thread-safe."""

    def __init__(self, task: AuxiliaryTask, columns: tuple[Column, ...], run_id: str, batch_size: int) -> None:
        # Torch is in the process since the task was loaded; the model is built with the first snapshot.
        from mps_trainer.tasks.snapshot_scorer import SnapshotScorer

        self._scorer = SnapshotScorer(task, columns, run_id, batch_size)
        self._num_errors = 0

    @property
    def version(self) -> int:
        """Of the model that scores; -1 when there is none yet."""
        return self._scorer.version

    @property
    def trained_ns(self) -> int:
        """CLOCK_MONOTONIC when that model last took a training step."""
        return self._scorer.trained_ns

    def refresh(self) -> dict[str, int | float]:
        """Take the newest snapshot. One that cannot be read is counted, and the weights before it stay in use.

        Raises TaskError when the task's model cannot be built here or does not fit.
        """
        begin = time.monotonic()
        try:
            self._scorer.refresh()
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

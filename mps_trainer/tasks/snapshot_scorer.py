"""Scores on the CPU from a snapshot of the sidecar's weights, in the operator's process (`score_where: operator`).

consumes    the run's snapshot of weights (`transport.weights`), rows as the operator extracted them
produces    scores, the same as the sidecar's from the same weights within float tolerance
waits for   nothing; it computes in the caller's thread, at most `batch_size` experiences at a time

It leaves the process as it is: torch's number of threads is not touched (Ray gives an actor OMP_NUM_THREADS, so
scoring takes as many cores as the actor was given), and the random numbers of torch, numpy and Python go on as if
nothing had been asked. These generators are the process's: what another thread of the actor draws meanwhile is drawn
again later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from mps_trainer.columns import Array, Column, Rows
from mps_trainer.errors import MpsTrainerError, TaskError
from mps_trainer.tasks.asking import parts_of, to_numbers
from mps_trainer.tasks.base import AuxiliaryTask
from mps_trainer.tasks.batch import TaskBatch
from mps_trainer.tasks.model_weights import load_weights
from mps_trainer.tasks.random_state import random_state_kept
from mps_trainer.transport import WeightsReader, decode_batch, encode_batch


class SnapshotScorer:
    """Not thread-safe: call it from one thread.

    Attributes:
        version: training steps of the weights that it holds; -1 before the first snapshot.
        trained_ns: CLOCK_MONOTONIC when the last of these steps was taken.
    """

    def __init__(
        self,
        task: AuxiliaryTask,
        columns: Sequence[Column],
        run_id: str,
        batch_size: int,
        model: nn.Module | None = None,
    ) -> None:
        """`model` is what `build_scoring_model` gave; without it the first `refresh` builds one, however long."""
        self.version = -1
        self.trained_ns = 0
        self._task = task
        self._columns = columns
        self._batch_size = batch_size
        self._reader = WeightsReader(run_id)
        self._model = model

    @property
    def has_weights(self) -> bool:
        """Whether it can score; a dead sidecar does not change that."""
        return self.version >= 0

    def refresh(self, deadline: float = math.inf, **tries: int) -> bool:
        """Take the newest snapshot if there is a newer one; whether there was. Args: see `WeightsReader.look`.

        Raises TransportError when the snapshot cannot be read, TaskError when the task's model does not fit it; the
        weights from before stay in use after the first, none after the second.
        """
        snapshot = self._reader.look(deadline, **tries)
        if snapshot is None:
            return False
        self.version = -1
        try:
            if self._model is None:
                self._model = build_scoring_model(self._task)
            load_weights(self._model, snapshot.tensors)
        except TaskError:
            # Said again with every batch, as long as nothing else is published.
            self._reader.forget()
            raise
        self.version, self.trained_ns = snapshot.head.version, snapshot.head.trained_ns
        return True

    def score(self, rows: Rows, deadline: float) -> Array:
        """(n,) float32: one score for each row; NaN for what was not reached by `deadline` (monotonic seconds).

        Raises ExperienceError for rows that do not fit the columns, TaskError when the task fails.
        """
        assert self._model is not None, "refresh() first"
        # Through the codec: the very numbers and types that the sidecar would see.
        packed = decode_batch(encode_batch(rows, self._columns), self._columns)
        scores = np.full(packed.num_rows, np.nan, np.float32)
        for start, part in parts_of(packed, self._batch_size):
            if time.monotonic() >= deadline:
                break
            found = self._ask(self._model, TaskBatch.from_packed(part), part.num_rows)
            if not np.isfinite(found).all():
                raise self._error("gave scores that are not finite", "make score() finite for every experience")
            scores[start : start + part.num_rows] = found
        return scores

    def close(self) -> None:
        """Leave the snapshot's file."""
        self._reader.close()

    def _ask(self, model: nn.Module, batch: TaskBatch, num_rows: int) -> Array:
        model.eval()
        try:
            with random_state_kept(), torch.inference_mode():
                return to_numbers("score", self._task.score(model, batch), num_rows)
        except MpsTrainerError:
            raise
        except Exception as error:
            raise self._error(f"raised {type(error).__name__}: {error}", "make score() work on the CPU") from error

    def _error(self, what: str, todo: str) -> TaskError:
        return TaskError(
            f"score of task {type(self._task).__name__}, asked by the operator at step {self.version}, {what}",
            f"{todo}, or use score_where: sidecar",
        )


def build_scoring_model(task: AuxiliaryTask) -> nn.Module:
    """The task's model on the CPU, for `SnapshotScorer`. TaskError when it cannot be built here."""
    try:
        with random_state_kept():
            return task.build_model().requires_grad_(False).eval()
    except Exception as error:
        raise TaskError(
            f"build_model of task {type(task).__name__} raised {type(error).__name__} in the operator: {error}",
            "make it work on the CPU of the explorer's node, or use score_where: sidecar",
        ) from error

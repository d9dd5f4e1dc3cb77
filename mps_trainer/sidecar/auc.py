"""The area under the ROC curve, from ranks: the chance that a positive is predicted above a negative."""

from __future__ import annotations

from collections import deque

import numpy as np

from mps_trainer.columns import Array


def area_under_curve(predicted: Array, came_true: Array) -> float | None:
    """AUC of (n,) predictions against (n,) outcomes in {0, 1}; ties count half. None unless both outcomes occur.

    It is the Mann-Whitney statistic over the number of pairs (Hanley and McNeil, Radiology 143, 1982).
    """
    positive = np.asarray(came_true) > 0.5
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if num_positive == 0 or num_negative == 0:
        return None
    _, place, count = np.unique(np.asarray(predicted), return_inverse=True, return_counts=True)
    last_rank = np.cumsum(count)
    rank = (last_rank - (count - 1) / 2)[place.reshape(-1)]
    return float((rank[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


class RunningAuc:
    """AUC over about the last `window` experiences, in whole batches."""

    def __init__(self, window: int = 1024) -> None:
        self._window = window
        self._batches: deque[tuple[Array, Array]] = deque()
        self._size = 0

    def add(self, predicted: Array, came_true: Array) -> None:
        """Add (n,) predictions and outcomes; the oldest batches leave once the rest fill the window."""
        self._batches.append((predicted, came_true))
        self._size += len(predicted)
        while self._size - len(self._batches[0][0]) >= self._window:
            self._size -= len(self._batches.popleft()[0])

    def value(self) -> float | None:
        """The AUC, or None while only one of the outcomes has been seen."""
        if not self._batches:
            return None
        predicted, came_true = self.state()
        return area_under_curve(predicted, came_true)

    def state(self) -> tuple[Array, Array]:
        """All predictions and outcomes of the window, oldest first."""
        if not self._batches:
            return np.zeros(0, np.float32), np.zeros(0, np.float32)
        return (
            np.concatenate([predicted for predicted, _ in self._batches]),
            np.concatenate([came_true for _, came_true in self._batches]),
        )

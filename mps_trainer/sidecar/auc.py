"""The area under the ROC curve, from ranks: the chance that a positive is predicted above a negative."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from mps_trainer.columns import Array


def count_ordered_pairs(predicted: Array, came_true: Array) -> tuple[float, int]:
    """Of all pairs of a positive and a negative: how many are predicted in the right order (ties half), and all.

    This is the Mann-Whitney statistic, from ranks (Hanley and McNeil, Radiology 143, 1982).
    """
    positive = np.asarray(came_true) > 0.5
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if num_positive == 0 or num_negative == 0:
        return 0.0, 0
    _, place, count = np.unique(np.asarray(predicted), return_inverse=True, return_counts=True)
    last_rank = np.cumsum(count)
    rank = (last_rank - (count - 1) / 2)[place.reshape(-1)]
    ordered = float(rank[positive].sum()) - num_positive * (num_positive + 1) / 2
    return ordered, num_positive * num_negative


def area_under_curve(predicted: Array, came_true: Array) -> float | None:
    """AUC of (n,) predictions against (n,) outcomes in {0, 1}; ties count half. None unless both outcomes occur."""
    ordered, pairs = count_ordered_pairs(predicted, came_true)
    return ordered / pairs if pairs else None


class RunningAuc:
    """AUC over about the last `window` experiences, in whole records.

    Only pairs of one record are compared, since the model that predicted them was the same: the numbers of a model
    and of its predecessor are on different scales, and comparing them would make a model look worse while it learns.
    """

    def __init__(self, window: int = 1024) -> None:
        self._window = window
        self._records: deque[tuple[float, int, int]] = deque()
        self._size = 0

    def add(self, predicted: Array, came_true: Array) -> None:
        """Add a record's (n,) predictions and outcomes; the oldest records leave once the rest fill the window."""
        self._append((*count_ordered_pairs(predicted, came_true), len(predicted)))

    def value(self) -> float | None:
        """The AUC, or None before there was a record with both outcomes."""
        pairs = sum(record[1] for record in self._records)
        return sum(record[0] for record in self._records) / pairs if pairs else None

    def state(self) -> list[tuple[float, int, int]]:
        """Ordered pairs, pairs and experiences of each record, oldest first."""
        return list(self._records)

    def load_state(self, records: Iterable[tuple[float, int, int]]) -> None:
        """Take over what `state` returned."""
        for ordered, pairs, size in records:
            self._append((ordered, pairs, size))

    def _append(self, record: tuple[float, int, int]) -> None:
        self._records.append(record)
        self._size += record[2]
        while self._size - self._records[0][2] >= self._window:
            self._size -= self._records.popleft()[2]

"""The age of scores, and `max_staleness`: which are too old to count.

The age of a score is the time since the model that gave it last took a training step, at the moment when the score is
used. A remembered score (`on_late: last`) goes on growing older. One that is too old counts as late: `on_late` says
what becomes of its experience.
"""

from __future__ import annotations

import numpy as np

from mps_trainer.columns import Array


class Staleness:
    """`max_staleness` applied, and counted over the run."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._num_stale = 0

    def find(self, scores: Array, trained_ns: Array, now_ns: int) -> Array:
        """(n,) bool: which of the n scores are there and too old.

        Args:
            scores: float, NaN where there is none.
            trained_ns: int64, CLOCK_MONOTONIC of the last training step of the model of each score.
        """
        if self._limit_s is None:
            return np.zeros(len(scores), dtype=bool)
        stale: Array = ~np.isnan(scores) & (ages_s(trained_ns, now_ns) > self._limit_s)
        return stale

    def count(self, stale: Array) -> dict[str, int | float]:
        """Metrics of a batch: scores of it that were too old, and of all so far. Nothing without a limit."""
        if self._limit_s is None:
            return {}
        self._num_stale += int(stale.sum())
        return {"score_stale": int(stale.sum()), "score_stale_total": self._num_stale}

    def why(self, age_s: float) -> str:
        """The reason of a drop."""
        return f"its score is {age_s:.3g} s old (max_staleness {self._limit_s:g} s)"


def ages_s(trained_ns: Array, now_ns: int) -> Array:
    """(n,) float64 seconds; a time in the future is no age."""
    ages: Array = np.maximum(0, now_ns - trained_ns) / 1e9
    return ages

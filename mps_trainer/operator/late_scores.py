"""What becomes of an experience whose score did not come in time, by the setting `on_late`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from mps_trainer.columns import Array

#: Experiences whose score is remembered; beyond, the oldest is forgotten.
_MAX_REMEMBERED = 65536


class LastScores:
    """The last score of each experience, and the mean of the last batch for those that were never scored."""

    def __init__(self) -> None:
        self._by_eid: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._mean = (float("nan"), 0)

    def remember(self, eids: Sequence[str], scores: Array, trained_ns: int = 0) -> None:
        """Note fresh scores, shape (n,); NaN is none. `trained_ns`: when their model last took a training step."""
        known = ~np.isnan(scores)
        if known.any():
            self._mean = float(scores[known].mean()), trained_ns
        for eid, score in zip(eids, scores.tolist(), strict=True):
            if score == score:
                self._by_eid[eid] = score, trained_ns
                self._by_eid.move_to_end(eid)
        while len(self._by_eid) > _MAX_REMEMBERED:
            self._by_eid.popitem(last=False)

    def fill(self, eids: Sequence[str], scores: Array, *, with_mean: bool) -> tuple[Array, Array]:
        """A copy of `scores` with the gaps filled from memory, and `trained_ns` of what was filled in (0 elsewhere).

        Args:
            with_mean: also fill what was never scored, with the mean of the last batch: right for correcting rewards,
                whose level must not jump, and wrong for choosing between experiences.
        """
        filled, trained_ns = scores.copy(), np.zeros(len(scores), np.int64)
        for index in np.flatnonzero(np.isnan(scores)):
            nothing = self._mean if with_mean else (float("nan"), 0)
            filled[index], trained_ns[index] = self._by_eid.get(eids[index], nothing)
        return filled, trained_ns

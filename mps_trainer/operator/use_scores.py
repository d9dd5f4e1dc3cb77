"""What scores do to experiences: filter them, or correct their rewards. Pure functions, no I/O.

A score of NaN means "no score" (its part of the batch was late or dropped): such an experience stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mps_trainer.columns import Array
from mps_trainer.config import FilterSettings, RewardSettings


@dataclass(frozen=True)
class Selection:
    """Which experiences of a batch stay.

    Attributes:
        keep: (n,) bool.
        limit: the score above which experiences were dropped; NaN when none was.
    """

    keep: Array
    limit: float

    @property
    def num_dropped(self) -> int:
        """How many do not stay."""
        return int((~self.keep).sum())


def select(scores: Array, settings: FilterSettings) -> Selection:
    """Choose the experiences to keep from scores of shape (n,) float; the highest go first."""
    keep = np.ones(len(scores), dtype=bool)
    known = np.flatnonzero(~np.isnan(scores))
    if settings.drop == "quantile":
        num_wanted = int(settings.value * len(known))
    else:
        num_wanted = int((scores[known] > settings.value).sum())
    num_dropped = max(0, min(num_wanted, len(scores) - settings.keep_at_least))
    if num_dropped == 0:
        return Selection(keep, float("nan"))
    # A stable sort makes equal scores drop in the order of arrival: the same batch gives the same answer.
    highest_first = known[np.argsort(-scores[known], kind="stable")]
    dropped = highest_first[:num_dropped]
    keep[dropped] = False
    return Selection(keep, float(scores[dropped].min()))


def correct_rewards(experiences: list[Any], scores: Array, settings: RewardSettings) -> int:
    """Correct the rewards in place and keep the raw one in `info["raw_reward"]`; returns how many changed.

    add: r + w * s; multiply: r * (1 + w * s); replace: w * s, with weight w and score s. An experience with
    no score, or with no reward to correct, stays as it is.
    """
    # All numbers first: whatever cannot be computed is found before the first reward has changed.
    corrected = [
        (experience, _corrected(experience.reward, settings.weight * score, settings.how))
        for experience, score in zip(experiences, scores.tolist(), strict=True)
        if not np.isnan(score) and (experience.reward is not None or settings.how == "replace")
    ]
    for experience, reward in corrected:
        experience.info["raw_reward"] = experience.reward
        experience.reward = reward
    return len(corrected)


def _corrected(raw: float, weighted: float, how: str) -> float:
    if how == "add":
        return float(raw + weighted)
    if how == "multiply":
        return float(raw * (1 + weighted))
    return float(weighted)

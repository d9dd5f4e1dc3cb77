"""What scores do to experiences: filter them, or correct their rewards. Pure functions, no I/O.

A score of NaN means "no score" (its part of the batch was late or dropped): such an experience stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        limit: the lowest score among the dropped; NaN when none was dropped.
    """

    keep: Array
    limit: float

    @property
    def num_dropped(self) -> int:
        """How many do not stay."""
        return int((~self.keep).sum())


def select(scores: Array, settings: FilterSettings, groups: Sequence[str] | None = None) -> Selection:
    """Choose the experiences to keep; the highest scores go first, of equal ones those that came first.

    Args:
        scores: (n,) float; NaN: no score, stays.
        groups: for `per: group`, the task of each of the n experiences; those of one task are compared with each other.
    """
    keep = np.ones(len(scores), dtype=bool)
    if settings.per == "group" and groups is not None:
        members: dict[str, list[int]] = {}
        for index, group in enumerate(groups):
            members.setdefault(group, []).append(index)
        parts = [np.array(part) for part in members.values()]
    else:
        parts = [np.arange(len(scores))]
    for part in parts:
        keep[part[_to_drop(scores[part], settings)]] = False
    return Selection(keep, float(scores[~keep].min()) if not keep.all() else float("nan"))


def _to_drop(scores: Array, settings: FilterSettings) -> Array:
    """Indices into `scores` of what goes."""
    known = np.flatnonzero(~np.isnan(scores))
    if settings.drop == "quantile":
        num_wanted = settings.num_in_share(len(known))
    elif settings.drop == "top_k":
        num_wanted = min(int(settings.value), len(known))
    else:
        num_wanted = int((scores[known] > settings.value).sum())
    num_dropped = max(0, min(num_wanted, len(scores) - settings.keep_at_least))
    # A stable sort makes equal scores drop in the order of arrival: the same batch gives the same answer.
    highest_first: Array = known[np.argsort(-scores[known], kind="stable")]
    return highest_first[:num_dropped]


def correct_rewards(experiences: list[Any], scores: Array, settings: RewardSettings) -> int:
    """Correct the rewards in place and keep the raw one in `info["raw_reward"]`; returns how many changed.

    add: r + w * s; multiply: r * (1 + w * s); replace: w * s, with weight w and score s; then into the range `clip`. An
    experience with no score, or with no reward to correct, stays as it is.
    """
    # All numbers first: whatever cannot be computed is found before the first reward has changed.
    corrected = [
        (experience, _corrected(experience.reward, settings.weight * score, settings))
        for experience, score in zip(experiences, scores.tolist(), strict=True)
        if not np.isnan(score) and (experience.reward is not None or settings.how == "replace")
    ]
    for experience, reward in corrected:
        experience.info["raw_reward"] = experience.reward
        experience.reward = reward
    return len(corrected)


def _corrected(raw: float, weighted: float, settings: RewardSettings) -> float:
    if settings.how == "add":
        reward = float(raw + weighted)
    elif settings.how == "multiply":
        reward = float(raw * (1 + weighted))
    else:
        reward = float(weighted)
    if settings.clip is None:
        return reward
    lowest, highest = settings.clip
    return min(max(reward, lowest), highest)

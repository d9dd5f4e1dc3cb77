"""The rewards of a batch as they came and as they go on, for the monitor and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mps_trainer.columns import Array
from mps_trainer.run.quantiles import quantiles_of


def rewards_of(experiences: Sequence[Any]) -> Array:
    """(m,) float64: the rewards of those that have a finite one."""
    found = np.array([_reward(experience.reward) for experience in experiences], np.float64)
    finite: Array = found[np.isfinite(found)]
    return finite


def _reward(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        # None, or what no task can use either: the extraction says so.
        return float("nan")


@dataclass
class RewardChange:
    """What a batch did to the rewards.

    Attributes:
        metrics: `reward_mean` as they came, `reward_mean_kept` as they go on; nothing for a batch without rewards.
        quantiles: the same as lists of five, `rewards` and `rewards_kept`.
    """

    metrics: dict[str, int | float] = field(default_factory=dict)
    quantiles: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Array, after: Array) -> RewardChange:
        """From the rewards of a batch to those of what is left of it."""
        change = cls()
        for name, values in (("", before), ("_kept", after)):
            if len(values):
                change.metrics[f"reward_mean{name}"] = float(values.mean())
                change.quantiles[f"rewards{name}"] = quantiles_of(values)
        return change

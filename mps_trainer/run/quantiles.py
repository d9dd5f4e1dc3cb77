"""The numbers that stand for a batch's distribution: scores in metrics.jsonl, rewards in operator.jsonl."""

from __future__ import annotations

import numpy as np

from mps_trainer.columns import Array

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def quantiles_of(values: Array) -> list[float]:
    """The `QUANTILES` of at least one number, rounded to what a page shows."""
    return [round(float(value), 6) for value in np.quantile(values, QUANTILES)]

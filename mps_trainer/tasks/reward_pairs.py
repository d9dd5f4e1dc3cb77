"""Pairs of experiences whose rewards differ, as dense matrices: the memory depends on the batch's size alone.

Shape legend: B experiences. Entry (i, j) of a (B, B) matrix speaks of i against j.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus


def same_group(groups: Sequence[str], device: torch.device) -> Tensor:
    """(B, B) bool: whether two experiences are runs of one task."""
    number: dict[str, int] = {}
    ids = torch.tensor([number.setdefault(group, len(number)) for group in groups], device=device)
    return ids.unsqueeze(1) == ids.unsqueeze(0)


def better(outcomes: Tensor, comparable: Tensor, min_gap: float) -> Tensor:
    """(B, B) bool: the pairs, i being the one with the higher reward, by more than `min_gap`."""
    return comparable & (outcomes.unsqueeze(1) - outcomes.unsqueeze(0) > min_gap)


def pair_loss(rewards: Tensor, pairs: Tensor, comparable: Tensor, center: float) -> Tensor:
    """The mean of -log sigmoid(r_i - r_j) + center (r_i + r_j)^2 over the pairs of a group, then over the groups.

    0 without a pair.

    Each group counts the same (Ouyang et al. 2022, equation 1): else one with many runs would outweigh the others by
    the square of their number.
    """
    won = pairs.sum(dim=1).float()
    in_group = (comparable * won).sum(dim=1)
    weight = pairs / in_group.clamp(min=1).unsqueeze(1)
    one, other = rewards.unsqueeze(1), rewards.unsqueeze(0)
    losses = softplus(other - one) + center * (one + other).square()
    return (weight * losses).sum() / weight.sum().clamp(min=1)


def contradiction(rewards: Tensor, pairs: Tensor) -> Tensor:
    """(B,) in [0, 1]: the model's mean probability that a pair of this experience is the other way round; 0 without."""
    doubt = pairs * torch.sigmoid(rewards.unsqueeze(0) - rewards.unsqueeze(1))
    count = (pairs | pairs.T).sum(dim=1).clamp(min=1)
    return (doubt + doubt.T).sum(dim=1) / count


def group_mean(values: Tensor, comparable: Tensor) -> Tensor:
    """(B,): the mean over each experience's group."""
    return (comparable * values).sum(dim=1) / comparable.sum(dim=1)

"""What the built-in tasks read from tokens and logprobs when a workflow leaves no feature vector.

Shape legend: B experiences, T all tokens of a batch, K hash buckets.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mps_trainer.tasks.batch import Ragged

NUM_STATISTICS = 4
NUM_REPETITIONS = 3


def bucket_shares(tokens: Ragged, num_buckets: int) -> Tensor:
    """(B, K) float: the share of each row's tokens in each hash bucket; zeros for an empty row."""
    # Knuth's multiplicative hash (TAOCP volume 3, section 6.4) spreads neighbouring ids evenly.
    hashed = (tokens.values.long() * 2654435769) & 0xFFFFFFFF
    cell = tokens.row_index * num_buckets + ((hashed * num_buckets) >> 32)
    counts = torch.zeros(len(tokens.lengths) * num_buckets, device=cell.device)
    counts.index_add_(0, cell, torch.ones_like(cell, dtype=torch.float32))
    shares: Tensor = counts.view(-1, num_buckets) / tokens.lengths.clamp(min=1).unsqueeze(1)
    return shares


def histogram(tokens: Ragged, num_buckets: int) -> Tensor:
    """(B, K): `bucket_shares` times sqrt(K), so that its entries are near 1 for any K."""
    return bucket_shares(tokens, num_buckets) * math.sqrt(num_buckets)


def statistics(logprobs: Ragged, num_tokens: Tensor) -> Tensor:
    """(B, 4): mean, minimum and standard deviation of the logprobs, log of the number of tokens; each near [-1, 1]."""
    # Masked tokens often carry the lowest float there is, whose square overflows.
    values = logprobs.values.float().clamp(-100, 0)
    mean, square = logprobs.mean_of(torch.stack([values, values.square()], dim=1)).unbind(dim=1)
    lowest = torch.zeros_like(mean).scatter_reduce_(0, logprobs.row_index, values, "amin")
    deviation = (square - mean.square()).clamp(min=0).sqrt()
    return torch.stack([mean / 4, lowest / 16, deviation / 4, torch.log1p(num_tokens.float()) / 8], dim=1)


def repetition(tokens: Ragged) -> Tensor:
    """(B, 3): the share of tokens that equal the one 1, 2 and 4 places before them in the same row."""
    rows, values = tokens.row_index, tokens.values
    same = torch.zeros(len(values), NUM_REPETITIONS, device=values.device)
    for column, distance in enumerate((1, 2, 4)):
        if len(values) > distance:
            equal = (values[distance:] == values[:-distance]) & (rows[distance:] == rows[:-distance])
            same[distance:, column] = equal
    return tokens.mean_of(same)

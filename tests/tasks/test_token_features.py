"""Against the same thing written row by row."""

from __future__ import annotations

import math

import numpy as np
import torch

from mps_trainer.tasks.batch import Ragged
from mps_trainer.tasks.token_features import bucket_shares, repetition, statistics

ROWS = [[3, 3, 5, 3, 3], [], [7], [1, 2, 1, 2, 1, 2, 1], []]


def ragged(rows: list[list[float]], dtype: torch.dtype) -> Ragged:
    values = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return Ragged(values, torch.tensor(np.cumsum([0, *map(len, rows)])))


def test_every_value_has_its_row_and_empty_rows_have_none() -> None:
    assert ragged(ROWS, torch.int32).row_index.tolist() == [0] * 5 + [2] + [3] * 7
    assert ragged([[], []], torch.int32).row_index.tolist() == []


def test_means_of_one_and_of_several_numbers_a_token() -> None:
    tokens = ragged(ROWS, torch.float32)
    wanted = torch.tensor([np.mean(row) if row else 0.0 for row in ROWS], dtype=torch.float32)
    torch.testing.assert_close(tokens.mean(), wanted)
    both = tokens.mean_of(torch.stack([tokens.values, tokens.values > 2], dim=1))
    above = torch.tensor([np.mean(np.array(row) > 2) if row else 0.0 for row in ROWS], dtype=torch.float32)
    torch.testing.assert_close(both, torch.stack([wanted, above], dim=1))


def test_statistics_of_logprobs_with_a_masked_one() -> None:
    rows = [[-0.5, -2.0, -0.1], [], [torch.finfo(torch.float32).min], [-1.0] * 4]
    found = statistics(ragged(rows, torch.float32), torch.tensor([3, 0, 1, 4]))
    for row, length, line in zip(rows, (3, 0, 1, 4), found.tolist(), strict=True):
        clamped = np.clip(row, -100, 0) if row else np.zeros(1)
        wanted = [clamped.mean() / 4, clamped.min() / 16, clamped.std() / 4, math.log1p(length) / 8]
        np.testing.assert_allclose(line, wanted, atol=1e-6)


def test_repetition_never_looks_across_rows() -> None:
    found = repetition(ragged(ROWS, torch.int32)).tolist()
    for row, line in zip(ROWS, found, strict=True):
        wanted = [np.mean([k >= d and row[k] == row[k - d] for k in range(len(row))]) if row else 0 for d in (1, 2, 4)]
        np.testing.assert_allclose(line, wanted, atol=1e-6)


def test_shares_of_buckets_add_up_to_one_or_to_nothing() -> None:
    shares = bucket_shares(ragged(ROWS, torch.int32), 16)
    assert shares.sum(dim=1).tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert sorted(shares[3].tolist(), reverse=True)[:2] == [np.float32(4 / 7), np.float32(3 / 7)]

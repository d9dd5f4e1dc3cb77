"""Milliseconds for the places of a draw of 256, the median of 60 (2 cores shared with other jobs; numpy 1.26):

                    of 8,192    of 65,536    of 1,000,000
uniform                0.008        0.008           0.008
recency                0.046        0.052           0.10
priority               0.075        0.25            3.2 to 7
uniform, balanced      0.030        0.044           0.28
priority, balanced     0.12         0.66           7 to 12
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from mps_trainer.config import ReplaySettings
from mps_trainer.sidecar.sampling import LEAST_LOSS, Sampler, draw_weighted


def counts(places: list[Any], size: int) -> Any:
    return np.bincount(np.concatenate(places), minlength=size)


def test_a_weighted_draw_takes_one_after_another_from_those_that_are_left() -> None:
    weights = np.array([8.0, 4.0, 2.0, 1.0, 1.0])
    expected = np.zeros(5)
    for order in itertools.permutations(range(5), 3):
        left, chance = weights.sum(), 1.0
        for place in order:
            chance *= weights[place] / left
            left -= weights[place]
        expected[list(order)] += chance
    rng, draws = np.random.default_rng(0), 4000
    drawn = [draw_weighted(rng, weights, 3, np.cumsum(weights)) for _ in range(draws)]
    assert all(len(set(places)) == 3 for places in map(list, drawn))
    found = counts(drawn, 5) / draws
    deviation = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(found - expected) < 5 * deviation).all(), (found, expected)


def test_what_is_all_but_impossible_is_drawn_when_nothing_else_is_left() -> None:
    weights = np.array([1.0, 1e-250, 1e-260, 1.0])
    drawn = draw_weighted(np.random.default_rng(0), weights, 4, np.cumsum(weights))
    assert sorted(drawn[:2].tolist()) == [0, 3]
    assert drawn[2:].tolist() == [1, 2]
    sampler = Sampler(ReplaySettings(sampling="recency", half_life=1), 5000)
    places, _ = sampler.draw(np.random.default_rng(0), 5000, 256, None, None)
    assert len(set(places.tolist())) == 256
    assert places.min() > 4700


def test_half_as_often_after_a_half_life() -> None:
    sampler = Sampler(ReplaySettings(sampling="recency", half_life=100), 1000)
    rng = np.random.default_rng(0)
    found = counts([sampler.draw(rng, 1000, 10, None, None)[0] for _ in range(4000)], 1000)
    newest, older, oldest = found[900:].sum(), found[800:900].sum(), found[:100].sum()
    # 40,000 draws: about 20,000, 10,000 and 39 of them; the shares of a geometric series.
    assert abs(newest - 20_020) < 700
    assert abs(older - 10_010) < 500
    assert 10 < oldest < 90


def test_priorities_and_the_importance_weights_that_undo_them() -> None:
    settings = ReplaySettings(sampling="priority", priority_exponent=0.5, importance_exponent=1.0)
    sampler = Sampler(settings, 100)
    losses = np.repeat([0.0, 1.0, -4.0, 9.0], 25).astype(np.float32)
    priorities = sampler.priority(losses)
    np.testing.assert_allclose(priorities[::25], np.sqrt([LEAST_LOSS, 1 + LEAST_LOSS, 4 + LEAST_LOSS, 9 + LEAST_LOSS]))
    rng = np.random.default_rng(0)
    draws = [sampler.draw(rng, 100, 1, priorities, None)[0] for _ in range(12_000)]
    by_loss = counts(draws, 100).reshape(4, 25).sum(1)
    np.testing.assert_allclose(by_loss / by_loss.sum(), priorities[::25] / priorities[::25].sum(), atol=0.02)
    places, weights = sampler.draw(rng, 100, 40, priorities, None)
    assert weights is not None
    assert weights.dtype == np.float32
    # N P(i) to the power of minus one, over the largest.
    np.testing.assert_allclose(weights, priorities[places].min() / priorities[places], rtol=1e-6)
    assert Sampler(ReplaySettings(sampling="priority", importance_exponent=0), 9).draw(rng, 9, 4, np.ones(9), None)[
        1
    ].tolist() == [1, 1, 1, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("sampling", ["uniform", "recency", "priority"])
def test_equal_shares_of_each_class_that_is_held(sampling: Any) -> None:
    sampler = Sampler(ReplaySettings(sampling=sampling, class_balance=True), 1000)
    rng = np.random.default_rng(0)
    classes = np.zeros(1000, np.uint8)
    classes[::100], classes[1::2] = 7, 255  # 10 rows, 500 rows, and 490 of class 0
    priorities = np.linspace(0.1, 1, 1000) if sampling == "priority" else None
    for _ in range(20):
        places, weights = sampler.draw(rng, 1000, 256, priorities, classes)
        shares = np.bincount(classes[places])[[0, 7, 255]]
        assert sorted(shares.tolist()) == [85, 85, 86]
        repeats = np.unique(places, return_counts=True)
        rare = classes[repeats[0]] == 7
        assert set(repeats[1][rare].tolist()) <= {8, 9}, "each of the few as often as the others"
        assert (repeats[1][~rare] == 1).all()
        assert (weights is None) == (sampling != "priority")
    sampler.changed()
    places, _ = sampler.draw(rng, 1000, 256, priorities, np.full(1000, 3, np.uint8))
    assert len(set(places.tolist())) == 256, "one class alone: nothing to balance"


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("sampling", ["uniform", "recency", "priority"])
def test_a_draw_from_65536_costs_little(sampling: Any, balance: bool) -> None:
    size, rng = 65_536, np.random.default_rng(0)
    sampler = Sampler(ReplaySettings(sampling=sampling, class_balance=balance), size)
    priorities = sampler.priority(rng.exponential(size=size)) if sampling == "priority" else None
    classes = (rng.random(size) < 0.1).astype(np.uint8) if balance else None
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        sampler.draw(rng, size, 256, priorities, classes)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.1  # about 1 ms; the limit is for a slow and busy machine

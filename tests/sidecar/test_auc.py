from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mps_trainer.sidecar.auc import RunningAuc, area_under_curve


def by_counting_pairs(predicted: list[float], came_true: list[int]) -> float | None:
    rows = list(zip(predicted, came_true, strict=True))
    pairs = [(p, n) for p, y in rows if y for n, z in rows if not z]
    if not pairs:
        return None
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9]), st.integers(0, 1)), min_size=1, max_size=40))
def test_equals_the_count_of_ordered_pairs(rows: list[tuple[float, int]]) -> None:
    predicted, came_true = map(list, zip(*rows, strict=True))
    expected = by_counting_pairs(predicted, came_true)
    found = area_under_curve(np.array(predicted), np.array(came_true))
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert abs(found - expected) < 1e-12


def test_the_window_forgets_whole_records_once_the_rest_fill_it() -> None:
    running = RunningAuc(window=10)
    assert running.value() is None
    running.add(np.array([1.0, 0.0]), np.array([0, 1]))
    assert running.value() == 0.0
    for _ in range(2):
        running.add(np.array([0.9] * 2 + [0.1] * 3), np.array([1] * 2 + [0] * 3))
    assert running.value() == 1.0
    assert sum(size for _, _, size in running.state()) == 10


def test_only_pairs_of_one_record_are_compared() -> None:
    running = RunningAuc()
    running.add(np.array([0.9, 0.8]), np.array([1, 0]))
    running.add(np.array([0.2, 0.1]), np.array([1, 0]))
    running.add(np.array([0.5]), np.array([1]))
    assert running.value() == 1.0
    successor = RunningAuc()
    successor.load_state(running.state())
    assert successor.state() == running.state()

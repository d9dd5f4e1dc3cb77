"""A short form of scripts/kill_sidecar.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sidecar_kills import Outcome, compare_arrays, compare_with_unbroken
from warm_sidecar import WarmSidecars


@pytest.fixture(scope="module")
def sidecars() -> Iterator[WarmSidecars]:
    with WarmSidecars() as parent:
        yield parent


@pytest.mark.parametrize(("variant", "seed"), [("priority", 1), ("recency", 2), ("epochs", 3)])
def test_killed_at_random_it_arrives_where_an_unbroken_run_does(
    sidecars: WarmSidecars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, seed: int
) -> None:
    monkeypatch.setenv("MPS_TRAINER_STATE_DIR", str(tmp_path / "state"))
    outcome = compare_with_unbroken(tmp_path, sidecars, variant, kills=4, seed=seed)
    assert outcome.compared > 50
    assert outcome.steps > 10


def test_a_difference_of_one_bit_is_one() -> None:
    ones, outcome = np.ones(3, np.float32), Outcome()
    compare_arrays("w", ones, ones.copy(), outcome)
    assert outcome.compared == 1
    for other in (np.nextafter(ones, np.float32(2)), ones.astype(np.float64), ones[:2]):
        with pytest.raises(AssertionError, match="w"):
            compare_arrays("w", ones, other, outcome)
    with pytest.raises(AssertionError, match="sign of a zero"):
        compare_arrays("w", np.zeros(1), -np.zeros(1), outcome)

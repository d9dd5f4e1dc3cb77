"""How the slowdown is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mps_trainer.run.engine_load import EngineLoad
from mps_trainer.sidecar.pace.slowdown import PRIOR, Slowdown


def loads(iterations: int, iteration_s: float, begin: EngineLoad, **more: Any) -> EngineLoad:
    return replace(begin, at=begin.at + iterations * iteration_s, iterations=begin.iterations + iterations, **more)


def fed(rows: list[tuple[bool, float]], **more: Any) -> Slowdown:
    """Windows of 10 iterations each of so many seconds."""
    slowdown, load = Slowdown(), EngineLoad(1.0, 200, 0, 100, 0, 0)
    slowdown.begin(load, on=rows[0][0])
    for i, (on, iteration_s) in enumerate(rows):
        load = loads(1, iteration_s, load)
        slowdown.look(load)
        load = loads(10, iteration_s, load, **more)
        if on:
            slowdown.trained(10 * iteration_s)
        slowdown.end(load)
        slowdown.begin(load, on=rows[i + 1][0] if i + 1 < len(rows) else on)
    return slowdown


def test_slowdown_is_that_of_neighbouring_windows_however_the_engine_drifts() -> None:
    rows = [(i % 4 >= 2, 0.01 * 0.98**i * (1.1 if i % 4 >= 2 else 1.0)) for i in range(24)]
    slowdown = fed(rows)
    assert slowdown.measured == pytest.approx(0.1, abs=0.005)
    assert slowdown.of(200) == pytest.approx(0.1, abs=0.005)
    assert slowdown.of(3) == pytest.approx(0.1, abs=0.005), "a batch that was never seen is taken for a known one"


def test_slowdown_is_a_careful_guess_until_there_are_enough_windows() -> None:
    slowdown = fed([(False, 0.01), (True, 0.02), (False, 0.01)])
    assert (slowdown.measured, slowdown.of(200)) == (None, PRIOR)


def test_windows_with_prompts_in_them_tell_nothing() -> None:
    rows = [(i % 2 == 1, 0.02 if i % 2 else 0.01) for i in range(24)]
    slowdown = Slowdown()
    load = EngineLoad(1.0, 200, 0, 100, 0, 0)
    for on, iteration_s in rows:
        slowdown.begin(load, on=on)
        load = loads(1, iteration_s, load)
        slowdown.look(load)
        load = loads(10, iteration_s, load, prefill=load.prefill + 100)
        slowdown.trained(10 * iteration_s if on else 0.0)
        slowdown.end(load)
    assert slowdown.measured is None

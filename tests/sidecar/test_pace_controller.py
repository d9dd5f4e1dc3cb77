"""The pace's controller, alone and against a simulated engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mps_trainer.config.pace import PaceTuning
from mps_trainer.run.engine_load import EngineLoad
from mps_trainer.sidecar.pace.controller import Controller

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from simulate_pace import A, B, Engine, Simulation, one

#: The rollout may lose a little more than the limit while the slowdown is not known yet.
TOLERANCE = 0.01
SHORT = Engine(longest_tokens=450, median_tokens=150)


@pytest.mark.parametrize("trainer", [A, B], ids=["A", "B"])
@pytest.mark.parametrize("limit", [0.03, 0.06])
def test_simulated_rollout_keeps_what_the_limit_says_and_the_limit_is_used(trainer: Any, limit: float) -> None:
    for seed in range(3):
        found = Simulation(SHORT, trainer, seed).run(3, 0.0, Controller(limit))
        assert found["kept"] >= 1 - limit - TOLERANCE
        assert 1 / found["kept"] - 1 > limit / 3, "a limit that is hardly used trains less than it may"


@pytest.mark.parametrize("gap", [0.0, 0.1, 0.3])
def test_simulated_pace_trains_more_than_a_fixed_duty_cycle_of_the_same_limit(gap: float) -> None:
    for trainer in (A, B):
        row = one(trainer, gap, 0.03, 3, seed=1)
        assert row["pace share"] > 1.1 * row["fixed share"]
        assert row["pace kept"] >= 0.97 - TOLERANCE


def test_simulated_gaps_are_trained_in_without_a_pause() -> None:
    none, some = (Simulation(SHORT, B, 2).run(3, gap, Controller(0.03)) for gap in (0.0, 0.3))
    # A share of 0.3 of the cycle, less the iteration in which it begins.
    assert some["share"] > none["share"] * 0.7 + 0.26


def test_simulated_trainer_that_suddenly_costs_more_is_slowed_down() -> None:
    heavy = replace(A, slows=0.5)
    simulation = Simulation(SHORT, A, 3, change=heavy)
    found = simulation.run(5, 0.0, Controller(0.03))
    last = found["walls"][-1] / found["solos"][-1] - 1
    assert last < 0.03 + 2 * TOLERANCE
    assert found["walls"][1] / found["solos"][1] - 1 < 0.25, "it never ran free"


def test_simulated_trainer_that_costs_nothing_trains_nearly_all_the_time() -> None:
    free = replace(A, slows=0.0)
    found = Simulation(SHORT, free, 4).run(3, 0.0, Controller(0.03))
    assert found["share"] > 0.6


def test_simulated_signal_that_falls_silent_means_an_engine_that_makes_no_tokens() -> None:
    simulation = Simulation(SHORT, A, 5, silent_from=2.0)
    simulation.run(1, 0.0, Controller(0.03))
    # All in the second half: before, the limit holds.
    assert simulation.steps > 0.4 * (simulation.now - 3.0) / A.step_s


def test_without_any_signal_the_controller_presumes_a_busy_engine() -> None:
    controller, now, trained = Controller(0.03), 0.0, 0.0
    while now < 60:
        if controller.may_step(now, None):
            now, trained = now + 0.05, trained + 0.05
            controller.stepped(0.05)
        else:
            now += controller.rest_s()
    assert 0.05 < trained / now < 0.2
    assert controller.may_step(now + 0.01, None, busy=False), "NVML sees an idle GPU"


def test_a_slowdown_that_is_given_is_not_measured() -> None:
    simulation = Simulation(SHORT, B, 1)
    found = simulation.run(2, 0.0, Controller(0.03, PaceTuning(fixed=0.9)))
    assert found["share"] < 0.06, "0.027 / 0.9 of the time"


def busy_steps(every: float, away: float, seconds: float = 60.0, *, located: bool = True) -> int:
    """Steps of 10 ms beside an engine with an iteration each 10 ms; the loop is away now and then."""
    controller, now, steps = Controller(0.03), 10.0, 0
    end, next_absence = now + seconds, now + every
    while now < end:
        if now >= next_absence:
            now += away
            next_absence = now + every
        if controller.may_step(now, EngineLoad(now, 200, 0, int(now * 100), int(now * 20000), 0, located=located)):
            now += 0.01
            controller.stepped(0.01)
            steps += 1
        else:
            now += controller.rest_s()
    return steps


def test_an_engine_that_may_be_on_another_gpu_is_not_measured() -> None:
    """It loses nothing here: where that is believed the sidecar trains nearly all the time."""
    assert busy_steps(1e9, 0.0) > 3 * busy_steps(1e9, 0.0, located=False) > 0


@pytest.mark.parametrize(("every", "away"), [(0.5, 0.3), (0.4, 0.27), (1.0, 0.3)])
def test_other_work_of_the_loop_that_recurs_does_not_starve_training(every: float, away: float) -> None:
    share_of_looks = every / (every + away)
    assert busy_steps(every, away) > 0.7 * share_of_looks * busy_steps(1e9, 0.0)


def test_an_absence_in_which_the_engine_did_nothing_earns_nothing() -> None:
    found = []
    for iterations in (0, 100_000):
        controller, now = Controller(0.03, PaceTuning(fixed=0.25)), 10.0
        load = EngineLoad(now, 200, 0, 1000, 0, 0)
        for number in range(20):
            now = 10.0 + 0.01 * number
            load = replace(load, at=now, iterations=1000 + number)
            controller.may_step(now, load)
        now += 5.0
        load = replace(load, at=now, iterations=load.iterations + iterations)
        controller.may_step(now, load)
        found.append(controller.may_step(now + 0.2, replace(load, at=now + 0.2, iterations=load.iterations + 20)))
    assert found == [False, True]


def test_an_iteration_that_takes_long_is_not_taken_for_silence() -> None:
    controller = Controller(0.03)
    now, load = 10.0, EngineLoad(10.0, 200, 0, 100, 0, 0)

    def is_busy_after(seconds: float) -> bool:
        nonlocal now, load
        for _ in range(round(seconds / 0.1)):
            now += 0.1
            controller.may_step(now, load)
        load = replace(load, at=now, iterations=load.iterations + 1, prefill=load.prefill + 1000)
        return controller.busy

    controller.may_step(now, load)
    assert not is_busy_after(1.5), "nothing was known of such iterations"
    assert is_busy_after(1.5)
    assert is_busy_after(4.0)
    assert not is_busy_after(20.0), "silence"
    for _ in range(100):
        assert controller.silent_s < 15, "a pause is no iteration"
        is_busy_after(0.1)
    assert not is_busy_after(1.5), "long iterations are forgotten"


@pytest.mark.parametrize("pauses", [True, False])
def test_training_pauses_while_prompts_are_computed_if_that_is_asked_for(*, pauses: bool) -> None:
    # An account that is always full: only the prompts can stop it.
    controller = Controller(0.9, PaceTuning(fixed=0.01, pause_on_prefill=pauses, shortest_window=0.01))
    at, prompts, allowed = 0.0, 0, []
    for iteration in range(1, 200):
        at += 0.01
        # Prompts in every tenth iteration, and in the one after it.
        prompts += 128 if iteration % 10 < 2 else 0
        may = controller.may_step(at, EngineLoad(at, 64, 0, iteration, 64 * iteration, prompts))
        allowed.append((iteration % 10 < 2, may))
        if may:
            controller.stepped(0.001)
    late = allowed[100:]
    assert all(may for computing, may in late if not computing)
    assert all(may != pauses for computing, may in late if computing)


def test_prompts_of_an_engine_that_is_not_heard_of_any_more_pause_nothing() -> None:
    controller = Controller(0.9, PaceTuning(fixed=0.01, pause_on_prefill=True, shortest_window=0.01))
    for iteration in range(100):
        at = 0.01 * iteration
        controller.may_step(at, EngineLoad(at, 64, 0, iteration, 0, 128 * iteration))
    found = []
    for _ in range(100):
        at += 0.01
        found.append(controller.may_step(at, None, busy=True))
    assert any(found)


def test_a_tiny_window_is_no_reason_to_ask_without_a_rest() -> None:
    controller = Controller(0.03, PaceTuning(shortest_window=1e-9, longest_window=1e-9))
    assert not controller.may_step(1.0, EngineLoad(1.0, 200, 0, 1, 1, 0))
    assert controller.rest_s() >= 1e-3

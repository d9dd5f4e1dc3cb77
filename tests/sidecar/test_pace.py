"""The pace: the controller against a simulated engine, and the gate between it and the steps."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from real_sidecar import token_rows
from sidecar_waits import wait_until
from test_schedule import COLUMNS, TASK, batch, name

from mps_trainer.config import Settings, load_settings
from mps_trainer.config.pace import PaceTuning, is_paced
from mps_trainer.errors import ConfigError
from mps_trainer.run import Status
from mps_trainer.run.engine_load import EngineLoad, LoadFile
from mps_trainer.run.exit_codes import OK
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.pace import gate
from mps_trainer.sidecar.pace.controller import Controller
from mps_trainer.sidecar.pace.gate import Gate
from mps_trainer.sidecar.pace.slowdown import PRIOR, Slowdown
from mps_trainer.sidecar.pace.source import Sight
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.steps import Steps
from mps_trainer.sidecar.trainer import make_trainer

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


class FakeSource:
    """What the gate looks at, set by the test."""

    def __init__(self, sight: Sight) -> None:
        self.sight = sight

    def look(self, now: float, last_step: float) -> Sight:
        return self.sight

    def close(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr(gate, "now", lambda: time[0])
    return time


def gate_of(sight: Sight, **settings: Any) -> tuple[Gate, Learner, FakeSource]:
    resolved = load_settings({"min_experiences": 10, "batch_size": 16, "steps_per_batch": 4, **settings})
    learner = Learner(make_trainer(TASK, resolved), ReplayBuffer(COLUMNS, 100, 0, None, resolved.replay), resolved)
    source = FakeSource(sight)
    return Gate(source, resolved, learner), learner, source  # type: ignore[arg-type]


BUSY = Sight("engine", EngineLoad(1e6, 200, 0, 100, 1000, 0))
IDLE = Sight("engine", EngineLoad(1e6, 0, 0, 100, 1000, 0))


def drive(pace: Gate, learner: Learner, clock: list[float], seconds: float, step_s: float = 0.01) -> int:
    """Ask and step for so long; the steps taken."""
    end, taken = clock[0] + seconds, 0
    while clock[0] < end:
        if learner.steps_due and pace.may_step():
            learner.steps_due -= 1
            clock[0] += step_s
            pace.stepped(step_s)
            taken += 1
        else:
            clock[0] += pace.wait_s(0.25)
    return taken


def test_an_idle_engine_lets_every_step_through(clock: list[float]) -> None:
    pace, learner, _ = gate_of(IDLE)
    learner.take(name(0), batch(20))
    assert drive(pace, learner, clock, 0.5) == 4


def test_the_floor_is_never_starved_and_a_contradiction_is_said(clock: list[float], caplog: Any) -> None:
    pace, learner, _ = gate_of(BUSY, min_steps_per_batch=3, max_rollout_slowdown=0.001)
    taken = []
    for number in range(8):
        learner.take(name(number), batch(20, 20 * number))
        taken.append(drive(pace, learner, clock, 1.0, step_s=0.1))
    assert sum(taken) >= 3 * 7, "the floor of a batch is taken by the end of the next"
    status = Status(run_id="r")
    pace.describe(status)
    assert "min_steps_per_batch 3 costs the rollout more" in status.pace_note
    assert sum("min_steps_per_batch 3" in record.message for record in caplog.records) == 1


def test_what_is_owed_is_bounded_and_the_rest_is_counted(clock: list[float]) -> None:
    pace, learner, _ = gate_of(BUSY, min_steps_per_batch=0, max_rollout_slowdown=1e-6)
    for number in range(20):
        learner.take(name(number), batch(20, 20 * number))
        drive(pace, learner, clock, 0.05)
    assert learner.steps_due == 8 * 4
    assert learner.counters.steps_skipped == 12 * 4


def test_passes_that_are_skipped_are_taken_out_of_the_plan(clock: list[float]) -> None:
    schedule = {"train": "epochs", "epochs": 1}
    pace, learner, _ = gate_of(BUSY, min_steps_per_batch=0, max_rollout_slowdown=1e-6, schedule=schedule)
    for number in range(12):
        learner.take(name(number), batch(20, 20 * number))
        pace.may_step()
    # Five batches are in the replay buffer; the steps of those that have left it cannot be taken.
    assert (learner.steps_due, learner.counters.steps_skipped) == (5 * 2, 7 * 2)
    learner.skip(3)
    learner.train_step()
    assert (learner.steps_due, learner.counters.steps_skipped) == (6, 17)


def test_a_step_that_is_too_long_is_said(clock: list[float]) -> None:
    pace, learner, _ = gate_of(BUSY, min_steps_per_batch=4)
    for number in range(4):
        learner.take(name(number), batch(20, 20 * number))
        drive(pace, learner, clock, 4.0, step_s=2.0)
    learner.trainer.step = 8
    status = Status(run_id="r")
    pace.describe(status)
    assert "lower batch_size" in status.pace_note
    assert status.pace_source == "engine"


def test_the_end_of_a_run_takes_what_is_owed(clock: list[float]) -> None:
    pace, learner, _ = gate_of(BUSY, min_steps_per_batch=0, max_rollout_slowdown=1e-6)
    learner.take(name(0), batch(20))
    assert drive(pace, learner, clock, 0.5) == 0
    pace.stop()
    assert drive(pace, learner, clock, 0.5) == 4


def test_a_record_waits_for_one_step_and_not_for_all_that_is_owed(clock: list[float]) -> None:
    pace, learner, _ = gate_of(IDLE)
    aside, report = SimpleNamespace(before_step=lambda _: None), SimpleNamespace(stepped=lambda *_: None)
    steps = Steps(learner, aside, report, pace=pace)  # type: ignore[arg-type]
    learner.take(name(0), batch(20))
    assert not steps.take_due(lambda: False, lambda: True)
    assert learner.steps_due == 3
    for number in range(1, 9):
        learner.take(name(number), batch(20, 20 * number))
        pace.may_step()
    assert learner.steps_due == 8 * 4
    assert not steps.take_due(lambda: False, lambda: True)
    assert learner.steps_due == 7 * 4, "with no room for one more batch, steps that would be skipped come first"
    pace.stop()
    assert steps.take_due(lambda: False, lambda: True), "at the end of the run all are taken"


def test_arrivals_alone_give_the_floor_at_once(clock: list[float]) -> None:
    pace, learner, _ = gate_of(Sight("arrivals"), min_steps_per_batch=2)
    learner.take(name(0), batch(20))
    assert drive(pace, learner, clock, 0.03) == 2


@pytest.mark.parametrize(
    ("pace", "mps", "paced"), [("auto", "on", True), ("auto", "off", False), ("on", "off", True), ("off", "on", False)]
)
def test_who_is_paced(pace: str, mps: str, paced: bool) -> None:
    assert is_paced(pace, mps) is paced


def test_a_floor_above_what_falls_due_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_steps_per_batch is 9"):
        load_settings({"min_steps_per_batch": 9})
    assert Settings(steps_per_batch=0).min_steps_per_batch == 1


#: No step beside a busy engine; one that a loaded machine keeps from speaking for a while is not idle.
STARVED = {
    "pace": "on", "max_rollout_slowdown": 1e-6, "min_steps_per_batch": 0, "batch_size": 32, "steps_per_batch": 4,
    "pace_tuning": {"silent": 60},
}  # fmt: skip


def test_real_successor_scores_though_steps_of_the_journal_wait_for_the_pace(make_run: Any) -> None:
    run = make_run(**STARVED)
    engine, idle = LoadFile(run.run_dir, 0, ()), threading.Event()

    def generate() -> None:
        while not idle.wait(0.02):
            engine.write(running=200, waiting=0, tokens=200, prefill=0)
        engine.write(running=0, waiting=0, tokens=0, prefill=0)

    generating = threading.Thread(target=generate)
    generating.start()
    try:
        child, _ = run.start()
        rng = np.random.default_rng(0)
        with run.channel() as channel:
            run.wait_for_attach(channel)
            for number in range(3):
                channel.send(token_rows(rng, 64, 64 * number), request_id=number, want_scores=False)
            wait_until(lambda: run.status().steps_owed == 12)
            child.kill()
            child.wait(10)
            child, _ = run.start()
            channel.send(token_rows(rng, 8, 900), request_id=3, want_scores=True)
            scores = channel.receive_scores(3, timeout_s=20)
            assert scores is not None
            assert scores.model_version == 0
            idle.set()
            wait_until(lambda: run.status().version == 16 and run.status().steps_owed == 0)
    finally:
        idle.set()
        generating.join()
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == OK
    engine.close()


def test_real_sidecar_yields_to_a_busy_engine_scores_meanwhile_and_trains_when_it_is_idle(make_run: Any) -> None:
    run = make_run(**STARVED)
    engine = LoadFile(run.run_dir, 0, ())
    child, _ = run.start()
    with run.channel() as channel:
        run.wait_for_attach(channel)
        rng = np.random.default_rng(0)

        def busy() -> None:
            engine.write(running=200, waiting=0, tokens=200, prefill=0)

        for number in range(3):
            busy()
            channel.send(token_rows(rng, 64, 64 * number), request_id=number, want_scores=False)
        wait_until(lambda: (busy(), run.status().steps_owed == 12)[1])
        assert run.status().version == 0
        assert [line["batch"] for line in run.metrics() if line["kind"] == "batch"] == [1, 2, 3], "told, though owed"
        assert run.status().pace_source == "engine"
        busy()
        channel.send(token_rows(rng, 8, 900), request_id=3, want_scores=True)
        scores = channel.receive_scores(3, timeout_s=20)
        assert scores is not None
        assert scores.model_version == 0
        busy()
        engine.write(running=0, waiting=0, tokens=0, prefill=0)
        wait_until(lambda: run.status().version == 16 and run.status().steps_owed == 0)
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == OK
    lines = [line for line in run.metrics() if line["kind"] == "batch"]
    assert lines[-1]["pace_source"] == "engine"
    engine.close()

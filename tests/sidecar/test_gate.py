"""The gate between the steps and the controller of the pace."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_schedule import COLUMNS, TASK, batch, name

from mps_trainer.config import load_settings
from mps_trainer.run import RunRecord, State, Status
from mps_trainer.run.engine_load import EngineLoad
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.loop import Sidecar
from mps_trainer.sidecar.pace import gate, named
from mps_trainer.sidecar.pace.gate import Gate, NoPace, Pace
from mps_trainer.sidecar.pace.named import pace_for
from mps_trainer.sidecar.pace.source import Sight
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.steps import Steps
from mps_trainer.sidecar.trainer import make_trainer


class FakeSource:
    """What the gate looks at, set by the test."""

    def __init__(self, sight: Sight) -> None:
        self.sight = sight

    def look(self, now: float, last_step: float, silent_s: float) -> Sight:
        return self.sight

    def close(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr(gate, "now", lambda: time[0])
    return time


def gate_of(sight: Sight, state: Any = None, **settings: Any) -> tuple[Gate, Learner, FakeSource]:
    resolved = load_settings({"pace": "on", "min_experiences": 10, "batch_size": 16, **settings})
    learner = Learner(make_trainer(TASK, resolved), ReplayBuffer(COLUMNS, 100, 0, None, resolved.replay), resolved)
    if state is not None:
        learner.load_state(*state)
    source = FakeSource(sight)
    return Gate(source, resolved, learner), learner, source  # type: ignore[arg-type]


BUSY = Sight("engine", EngineLoad(1e6, 200, 0, 100, 1000, 0))
IDLE = Sight("engine", EngineLoad(1e6, 0, 0, 100, 1000, 0))


def steps_of(pace: Gate, learner: Learner) -> Steps:
    aside, report = SimpleNamespace(before_step=lambda _: None), SimpleNamespace(stepped=lambda *_: None)
    return Steps(learner, aside, report, pace=pace)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("sight", "for_good", "taken"),
    [
        (BUSY, True, 0), (BUSY, False, 0), (IDLE, True, 4), (IDLE, False, 4),
        (Sight("arrivals"), True, 4), (Sight("arrivals"), False, 0), (Sight("nvml", busy=True), True, 0),
        (Sight("none", busy=False), False, 4),
    ],
)  # fmt: skip
def test_the_end_takes_what_is_owed_beside_an_idle_engine_only(
    clock: list[float], sight: Sight, for_good: bool, taken: int
) -> None:
    pace, learner, source = gate_of(BUSY, min_steps_per_batch=4, max_rollout_slowdown=1e-6)
    learner.take(name(0), batch(20))
    assert drive(pace, learner, clock, 0.5) == 0
    pace.drain(for_good=for_good)
    source.sight = sight
    assert drive(pace, learner, clock, 0.5) == taken
    assert learner.steps_due + taken == 4, "none is thrown away"


def test_a_record_waits_for_one_step_and_not_for_all_that_is_owed(clock: list[float]) -> None:
    pace, learner, _ = gate_of(IDLE)
    steps = steps_of(pace, learner)
    learner.take(name(0), batch(20))
    assert not steps.take_due(lambda: False, lambda: True)
    assert learner.steps_due == 3
    for number in range(1, 9):
        learner.take(name(number), batch(20, 20 * number))
    assert (learner.steps_due, learner.counters.steps_skipped) == (8 * 4, 3), "a trainer that is behind skips"
    assert not steps.take_due(lambda: False, lambda: True)
    assert learner.steps_due == 8 * 4 - 1, "and scores are never late for it"
    assert steps.take_due(lambda: False), "where no record comes all are taken"


@pytest.mark.parametrize("state", [State.READY, State.DRAINING])
def test_a_record_overtakes_steps_with_a_pace_only_and_not_at_the_end(clock: list[float], state: State) -> None:
    pace, _, _ = gate_of(IDLE)
    status, hub = Status(run_id="r", state=state), SimpleNamespace(any_ready=lambda: True)

    def overtakes(pace: Pace) -> bool:
        loop: Any = SimpleNamespace(_pace=pace, _status=status, _hub=hub)
        return Sidecar._record_overtakes(loop)

    assert overtakes(pace) is (state is State.READY)
    assert not overtakes(NoPace())


def test_arrivals_alone_give_the_floor_at_once(clock: list[float]) -> None:
    pace, learner, _ = gate_of(Sight("arrivals"), min_steps_per_batch=2)
    learner.take(name(0), batch(20))
    assert drive(pace, learner, clock, 0.03) == 2


@pytest.mark.parametrize(
    ("settings", "batches", "taken"),
    [
        ({"steps_per_batch": 100, "schedule": {"train_every": 20}}, 40, 200),
        ({"steps_per_batch": 50, "min_experiences": 100}, 21, 100),
        ({"schedule": {"train": "epochs", "epochs": 10, "train_every": 12}}, 24, 80),
    ],
)
def test_beside_an_idle_engine_no_step_is_thrown_away(
    clock: list[float], settings: dict[str, Any], batches: int, taken: int
) -> None:
    pace, learner, _ = gate_of(IDLE, **settings)
    steps = steps_of(pace, learner)
    for number in range(batches):
        learner.take(name(number), batch(5, 5 * number))
        steps.take_due(lambda: False)
    assert (learner.trainer.step, learner.counters.steps_skipped) == (taken, 0)


def test_batches_that_bring_no_steps_do_not_count(clock: list[float]) -> None:
    schedule = {"train_every": 3}
    pace, learner, _ = gate_of(BUSY, min_steps_per_batch=0, max_rollout_slowdown=1e-6, schedule=schedule)
    for number in range(3 * 9):
        learner.take(name(number), batch(20, 20 * number))
        pace.may_step()
    assert (learner.steps_due, learner.counters.steps_skipped) == (8 * 4, 4)


def test_what_a_checkpoint_owes_is_not_thrown_away(clock: list[float]) -> None:
    settings = {"steps_per_batch": 10, "min_steps_per_batch": 0, "max_rollout_slowdown": 1e-6}
    pace, learner, _ = gate_of(BUSY, **settings)
    for number in range(4):
        learner.take(name(number), batch(20, 20 * number))
        pace.may_step()
    assert learner.steps_due == 40
    successor, loaded, _ = gate_of(BUSY, learner.state(), **settings)
    assert not successor.may_step()
    assert (loaded.steps_due, loaded.counters.steps_skipped) == (40, 0)
    for number in range(4, 14):
        loaded.take(name(number), batch(20, 20 * number))
        successor.may_step()
    assert (loaded.steps_due, loaded.counters.steps_skipped) == (80, 60), "four batches and ten, less eight"


def test_planned_passes_of_a_checkpoint_are_not_thrown_away(clock: list[float]) -> None:
    settings = {"min_steps_per_batch": 0, "max_rollout_slowdown": 1e-6, "schedule": {"train": "epochs", "epochs": 9}}
    _, learner, _ = gate_of(BUSY, **settings)
    learner.take(name(0), batch(40))
    successor, loaded, _ = gate_of(BUSY, learner.state(), **settings)
    assert not successor.may_step()
    assert (loaded.steps_due, loaded.counters.steps_skipped) == (27, 0)


@pytest.mark.parametrize("parts", [1, 2])
def test_passes_whose_experiences_have_all_left_are_skipped_and_no_step_is_taken(
    clock: list[float], parts: int
) -> None:
    schedule = {"train": "epochs", "train_every": 2}
    pace, learner, source = gate_of(BUSY, min_steps_per_batch=0, max_rollout_slowdown=1e-6, schedule=schedule)
    steps = steps_of(pace, learner)
    for number in range(2):
        learner.take(name(number), batch(20, 20 * number))
        steps.take_due(lambda: False)
    assert learner.steps_due == 3
    # This batch brings no steps, or is not in yet, and fills the replay buffer.
    learner.take(replace(name(2), parts=parts), batch(100, 100))
    assert (learner.steps_due, learner.counters.steps_skipped) == (0, 3)
    source.sight = IDLE
    assert steps.take_due(lambda: False)
    assert learner.trainer.step == 0


def test_a_step_without_experiences_is_none(clock: list[float]) -> None:
    pace, learner, _ = gate_of(IDLE, schedule={"train": "epochs"})
    learner.take(name(0), batch(20))
    arrays, state = learner.state()
    # As a checkpoint of an earlier version may be: the plan names experiences that have left.
    arrays["passes.numbers"] = arrays["passes.numbers"] + 1000
    _, loaded, _ = gate_of(IDLE, (arrays, state), schedule={"train": "epochs"})
    told: list[float] = []
    report = SimpleNamespace(stepped=lambda loss, ms: told.append(loss))
    steps = Steps(loaded, SimpleNamespace(before_step=lambda _: None), report, pace=pace)  # type: ignore[arg-type]
    assert steps.take_due(lambda: False)
    assert (told, loaded.trainer.step, loaded.counters.steps_skipped, loaded.counters.trained) == ([], 0, 2, 0)


def test_steps_that_are_due_wait_for_no_record_before_the_pace_was_asked(clock: list[float]) -> None:
    pace, learner, source = gate_of(BUSY, min_steps_per_batch=0, max_rollout_slowdown=1e-6)
    assert pace.wait_s(0.25) == 0.25
    learner.take(name(0), batch(20))
    assert pace.wait_s(0.25) == 0.0, "a pause has interrupted them"
    assert not pace.may_step()
    assert 0 < pace.wait_s(0.25) < 0.05
    source.sight = IDLE
    assert pace.may_step()
    assert pace.wait_s(0.25) == 0.0


def test_without_a_pace_nothing_looks_at_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    _, learner, _ = gate_of(IDLE)
    monkeypatch.setattr(named, "Source", lambda *_: pytest.fail("somebody looks"))
    record = RunRecord(
        run_id="r", config="", derived_config="", run_dir="/nowhere", ray_namespace="", settings={}, mps="on"
    )
    assert isinstance(pace_for(record, load_settings({}), learner, None), NoPace)  # type: ignore[arg-type]

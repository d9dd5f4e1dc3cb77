"""The order of a session and how it ends, with made-up engines and trainers in this process."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mps_trainer.bench import options as flags
from mps_trainer.bench.arms import Here, choose
from mps_trainer.bench.engine import BatchResult
from mps_trainer.bench.figures import figures
from mps_trainer.bench.plan import SessionPlan, make_plan
from mps_trainer.bench.run import loads
from mps_trainer.bench.session import Session, pinned
from mps_trainer.bench.work import WORKS
from mps_trainer.errors import RunError


class MadeUp:
    """Setting, trainer and engine in one, which notes what is asked of it; `batch_s` on a made-up clock."""

    def __init__(self, log: list[str], name: str = "", clock: MadeUpClock | None = None) -> None:
        self.log, self.name, self.clock = log, name, clock
        self.score_ms = [1.0]
        self.pid = os.getpid()
        self.facts = {"engine": "made up"}
        self.breaks = False
        self._steps = 0

    def __enter__(self) -> MadeUp:
        self.log.append("in")
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("out")

    def trainer(self, arm: Any, work: Any) -> MadeUp:
        return MadeUp(self.log, arm.name if work.name == "A" else f"{arm.name}/{work.name}", self.clock)

    def engines_are_up(self) -> None:
        self.log.append("up")

    def engine(self, name: str) -> MadeUp:
        self.log.append(f"start {name}")
        made = MadeUp(self.log, name, self.clock)
        made.breaks = self.breaks
        return made

    def wait_ready(self, timeout_s: float) -> None:
        self.log.append(f"ready {self.name}")

    def run(self, batch: Any, timeout_s: float) -> BatchResult:
        self.log.append(f"batch {self.name}")
        if self.breaks and self.log.count("batch plain") > 9:
            raise RunError("the engine has ended")
        assert self.clock is not None
        self.clock.now += 1.0
        return BatchResult(0.0, 1.0, batch.tokens, "d", 0, (1.0, 3.0), (4, 1))

    def start(self) -> None:
        self.log.append(f"start {self.name}")

    def resume(self) -> None:
        self.log.append(f"resume {self.name}")

    def pause(self) -> None:
        self._steps += 5
        self.log.append(f"pause {self.name}")

    def steps(self) -> int:
        self._steps += 3
        return self._steps

    def pids(self) -> list[int]:
        return []

    def problem(self) -> str:
        return ""

    def pace_source(self) -> str:
        return "nvml"

    def close(self) -> None:
        self.log.append(f"close {self.name}")


class MadeUpClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def plan_of(*argv: str, tasks: str = "A") -> tuple[SessionPlan, Any]:
    options = flags.parse(["--tiny", "--dedicated-s", "0", "--gap", "0", *argv])
    flags.complete(options, vllm=False)
    arms, _ = choose(None, Here(), tiny=True)
    return make_plan([WORKS[name] for name in tasks], arms, loads(options), options), options


def session(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, *argv: str, breaks: bool = False, tasks: str = "A"
) -> tuple[Session, list[str]]:
    clock, log = MadeUpClock(), []
    monkeypatch.setattr(time, "monotonic", clock)
    plan, options = plan_of(*argv, tasks=tasks)
    setting: Any = MadeUp(log, clock=clock)
    setting.breaks = breaks
    return Session(plan, options, setting, clock.now + budget_s, lambda _: None), log


def test_everything_is_started_measured_and_ended_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    one, log = session(monkeypatch, 1e6, "--rounds", "3", "--batches", "1", "--engines", "2")
    [found] = one.run()
    assert log[:8] == [
        "in", "start cpu-in-operator", "start sidecar-cpu", "start plain", "start second", "ready plain",
        "ready second", "up",
    ]  # fmt: skip
    assert (found["rounds"], found["cut"], len(found["windows"]), len(found["alone"])) == (3, "", 9, 3)
    trained = [w for w in found["windows"] if w["arm"] != "none"]
    assert [w["steps"] for w in trained] == [3] * 6
    assert [w["arm"] for w in found["windows"][:6]] == [
        "none", "cpu-in-operator", "sidecar-cpu", "cpu-in-operator", "sidecar-cpu", "none"
    ]  # fmt: skip
    assert found["windows"][0]["batches"][0]["token_ms_p99"] == 3.0
    assert [block["what"] for block in found["closing"]] == [
        "all trainers and engines there, at rest", "trainers ended", "the second engine ended too"
    ]  # fmt: skip
    assert log.index("close second") < log.index("out")
    assert log[-1] == "out"


def test_tasks_share_engines_and_the_windows_without_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    one, log = session(monkeypatch, 1e6, "--rounds", "2", "--batches", "1", tasks="AB")
    first, second = one.run()
    assert (first["task"], second["task"]) == ("A", "B")
    assert log.count("start plain") == 1
    for found in (first, second):
        arms = [w["arm"] for w in found["windows"]]
        assert sorted(arms) == ["cpu-in-operator"] * 2 + ["none"] * 2 + ["sidecar-cpu"] * 2
        assert len(found["alone"]) == 2
        assert len(found["closing"]) == 2
    solos = [[w for w in found["windows"] if w["arm"] == "none"] for found in (first, second)]
    assert solos[0] == solos[1]
    # Two rounds of a window alone and two for each task; the rest warms up and closes.
    assert log.count("batch plain") - 2 * 5 == 1 + 2 * 1


def test_engines_may_start_while_trainers_still_do(monkeypatch: pytest.MonkeyPatch) -> None:
    one, log = session(monkeypatch, 1e6, "--rounds", "1", "--overlap")
    one.run()
    assert log.index("start plain") < log.index("start sidecar-cpu") < log.index("ready plain")


def test_one_trainer_is_active_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one, log = session(monkeypatch, 1e6, "--rounds", "2")
    one.run()
    active: set[str] = set()
    for line in log:
        word, _, name = line.partition(" ")
        if word == "resume":
            assert not active
            active.add(name)
        elif word == "pause":
            active.remove(name)


def test_the_budget_ends_with_fewer_rounds_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # A round takes three windows of a second; after the second one a third would be too late.
    one, log = session(monkeypatch, 19.0, "--rounds", "5", "--batches", "1")
    [found] = one.run()
    assert 1 <= found["rounds"] < 5
    assert found["cut"] == f"the budget ended after {found['rounds']} of 5 rounds"
    assert len(found["windows"]) == 3 * found["rounds"]
    assert found["closing"]
    assert log[-1] == "out"


def test_a_round_that_the_budget_cuts_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one, log = session(monkeypatch, 100.0, "--rounds", "5", "--batches", "1")
    run = MadeUp.run

    def slow_from_the_second_round_on(self: MadeUp, batch: Any, timeout_s: float) -> BatchResult:
        assert self.clock is not None
        self.clock.now += 60.0 if log.count("batch plain") > 4 else 0.0
        return run(self, batch, timeout_s)

    monkeypatch.setattr(MadeUp, "run", slow_from_the_second_round_on)
    [found] = one.run()
    assert (found["rounds"], len(found["windows"])) == (1, 3)
    assert "left out" in found["cut"]
    assert log[-1] == "out"


def test_all_is_ended_when_an_engine_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    one, log = session(monkeypatch, 1e6, "--rounds", "9", breaks=True)
    [found] = one.run()
    # What was measured before is kept, the round that broke is not.
    assert found["failed"] == "RunError: the engine has ended"
    assert (found["rounds"], len(found["windows"])) == (1, 3)
    assert {"close plain", "close sidecar-cpu", "close cpu-in-operator", "out"} <= set(log)


def test_a_trainer_that_does_not_start_costs_its_arm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = session(monkeypatch, 1e6, "--rounds", "1", "--batches", "1")

    def start(self: MadeUp) -> None:
        if self.name == "sidecar-cpu":
            raise RunError("no room")

    monkeypatch.setattr(MadeUp, "start", start)
    [found] = one.run()
    assert found["not_started"] == {"sidecar-cpu": "no room"}
    assert [w["arm"] for w in found["windows"]] == ["none", "cpu-in-operator"]
    assert found["dedicated"] == "cpu-in-operator"


@pytest.mark.parametrize("act", ["resume", "pause"])
def test_a_trainer_that_ends_amid_a_window_costs_its_arm_alone(monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    one, log = session(monkeypatch, 1e6, "--rounds", "3", "--batches", "1")
    usual = getattr(MadeUp, act)

    def ends(self: MadeUp) -> None:
        # Once in the first round's window and once alone; its third time is the second round's window.
        if self.name == "sidecar-cpu" and self.log.count(f"{act} sidecar-cpu") == 2:
            raise RunError("the sidecar ended (signal SIGKILL)")
        usual(self)

    monkeypatch.setattr(MadeUp, act, ends)
    [found] = one.run()
    assert (found["rounds"], found["failed"]) == (3, "")
    assert found["ended"] == {"sidecar-cpu": "the sidecar ended (signal SIGKILL)"}
    problems = {w["round"]: w["problem"] for w in found["windows"] if w["arm"] == "sidecar-cpu"}
    # Nothing to measure where it was found dead before a batch.
    assert problems == ({0: ""} if act == "resume" else {0: "", 1: "the sidecar ended (signal SIGKILL)"})
    assert [w["round"] for w in found["windows"] if w["arm"] == "cpu-in-operator"] == [0, 1, 2]
    assert len(found["alone"]) == 1
    assert "close sidecar-cpu" in log
    rows = {row["arm"]: row for row in figures(found, batch_size=1, engines_here=1)}
    assert rows["cpu-in-operator"]["outputs"]["right"]


def test_a_session_without_a_trainer_left_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = session(monkeypatch, 1e6, "--rounds", "3", "--batches", "1")

    def ends(self: MadeUp) -> None:
        raise RunError("it ended")

    monkeypatch.setattr(MadeUp, "resume", ends)
    [found] = one.run()
    assert (found["rounds"], found["failed"][:28]) == (1, "RunError: no trainer is left")


def test_what_is_started_inside_is_pinned() -> None:
    before = os.sched_getaffinity(0)
    with pinned([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    "argv", [["--tiny", "--engine", "vllm"], ["--rounds", "0"], ["--task-args", "[]"]], ids=lambda argv: " ".join(argv)
)
def test_flags_that_make_no_sense_are_refused(argv: list[str]) -> None:
    from mps_trainer.errors import ConfigError

    with pytest.raises(ConfigError):
        flags.complete(flags.parse(argv), vllm=False)


def test_ranges_of_cores_and_lists_are_read(tmp_path: Path) -> None:
    options = flags.parse(["--pin-engine", "0-2,5", "--gap", "0,0.3", "--arms", "none, mps-low"])
    assert (options.pin_engine, options.gap, options.arms) == ((0, 1, 2, 5), (0.0, 0.3), ["none", "mps-low"])


def test_windows_of_a_paced_arm_say_what_the_pace_went_by(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = MadeUpClock(), []
    monkeypatch.setattr(time, "monotonic", clock)
    plan, options = plan_of("--rounds", "1", "--batches", "1")
    plan = replace(plan, arms=[replace(arm, paced=arm.name == "sidecar-cpu") for arm in plan.arms])
    setting: Any = MadeUp(log, clock=clock)
    [found] = Session(plan, options, setting, clock.now + 1e6, lambda _: None).run()
    assert {w["arm"]: w.get("pace_source") for w in found["windows"]} == {
        "none": None, "cpu-in-operator": None, "sidecar-cpu": "nvml"
    }  # fmt: skip


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunError("the engine has ended"), OSError("no room")])
def test_what_ends_the_first_round_is_raised_so_that_earlier_results_stay(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    one, log = session(monkeypatch, 1e6, "--rounds", "2", "--batches", "1")
    batches = []

    def run(self: MadeUp, batch: Any, timeout_s: float) -> BatchResult:
        batches.append(batch)
        if len(batches) == 3:
            raise error
        return BatchResult(0.0, 1.0, batch.tokens, "d", 0, (1.0, 3.0), (4, 1))

    monkeypatch.setattr(MadeUp, "run", run)
    with pytest.raises(type(error)):
        one.run()
    assert one.rounds == 0
    assert [line for line in log if line.startswith("close")] == [
        "close plain",
        "close sidecar-cpu",
        "close cpu-in-operator",
    ]
    assert log[-1] == "out"


def test_a_budget_that_ends_in_the_first_round_says_so_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, log = session(monkeypatch, 7.0, "--rounds", "2", "--batches", "1")
    with pytest.raises(RunError, match="the budget ended") as caught:
        one.run()
    assert "--budget-s" in str(caught.value.todo)
    assert log[-1] == "out"


def test_a_trainer_that_the_disk_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = session(monkeypatch, 1e6, "--rounds", "1", "--batches", "1")
    start = MadeUp.start

    def refused(self: MadeUp) -> None:
        if self.name == "sidecar-cpu":
            raise OSError(28, "No space left on device")
        start(self)

    monkeypatch.setattr(MadeUp, "start", refused)
    [found] = one.run()
    assert found["rounds"] == 1
    assert "No space left" in found["not_started"]["sidecar-cpu"]

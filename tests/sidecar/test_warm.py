"""The real sidecar, warm: everything done that needs no GPU, then a wait for the supervisor's word. Here it goes on
to the CPU; how it goes on to a GPU is in tests/gpu."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_sidecar import Run

from mps_trainer.errors import PlacementError
from mps_trainer.launcher.sidecar_process import sidecar_environment
from mps_trainer.run import RunPaths, State, Status
from mps_trainer.run.exit_codes import OK, TASK_FAILED
from mps_trainer.sidecar import ending
from mps_trainer.sidecar.gpu import untouched
from mps_trainer.sidecar.phases import Phases


class Warm:
    """A sidecar that was started warm; `go` is the supervisor's end of its pipe."""

    def __init__(self, run: Run) -> None:
        ready, ready_end = os.pipe()
        go_end, self.go = os.pipe()
        command = [sys.executable, "-m", "mps_trainer.sidecar", "--run-file", str(run.paths.run_file)]
        command += ["--ready-fd", str(ready_end), "--go-fd", str(go_end)]
        with (run.run_dir / "sidecar.log").open("ab") as log:
            self.child = subprocess.Popen(
                command,
                pass_fds=[ready_end, go_end],
                stdout=log,
                stderr=log,
                env=sidecar_environment(run.record, os.environ),
            )
        run.children.append(self.child)
        os.close(ready_end)
        os.close(go_end)
        self.said = os.fdopen(ready)

    def answer(self) -> dict[str, Any]:
        line = self.said.readline()
        return json.loads(line) if line else {}

    def close(self) -> None:
        self.said.close()
        if self.go >= 0:
            os.close(self.go)


@pytest.fixture
def warm(make_run: Any) -> Any:
    made: list[Warm] = []

    def start(restarts: int = 0, **settings: Any) -> tuple[Run, Warm]:
        run = make_run(**settings)
        if restarts:
            Status(run_id=run.run_id, state=State.RESTARTING, restarts=restarts).save(run.run_dir)
        made.append(Warm(run))
        return run, made[-1]

    yield start
    for one in made:
        one.close()


def test_it_waits_and_goes_on_to_ready_when_told(warm: Any) -> None:
    run, sidecar = warm()
    assert sidecar.answer() == {"state": "waiting"}
    assert run.status().state is State.WAITING
    assert run.status().pid == sidecar.child.pid
    assert not (run.run_dir / "startup.json").exists()
    told = time.monotonic()
    os.write(sidecar.go, b"g")
    assert sidecar.answer() == {"state": "ready"}
    took = time.monotonic() - told
    found = json.loads((run.run_dir / "startup.json").read_text())
    assert list(found["phases_s"]) == ["imports", "task", "model", "dry step", "rest"]
    assert found["ready_s"] == pytest.approx(sum(found["phases_s"].values()))
    assert 0 < found["summons_to_ready_s"] <= took
    before_s = sum(found["phases_s"][name] for name in ("imports", "task"))
    assert found["summons_to_ready_s"] <= found["ready_s"] - before_s + 1e-6, "what was done while it waited"
    assert "s of them after a wait of" in run.log()
    with run.channel() as channel:
        run.wait_for_attach(channel)
    sidecar.child.send_signal(signal.SIGTERM)
    assert sidecar.child.wait(90) == OK
    assert run.status().state is State.STOPPED


def test_a_word_that_comes_while_it_imports_is_found_afterwards(warm: Any) -> None:
    run, sidecar = warm()
    os.write(sidecar.go, b"g")
    os.close(sidecar.go)
    sidecar.go = -1
    assert sidecar.answer() == {"state": "waiting"}
    assert sidecar.answer() == {"state": "ready"}
    assert json.loads((run.run_dir / "startup.json").read_text())["waited_s"] < 60


def test_a_cold_start_says_where_its_seconds_went(make_run: Any) -> None:
    run = make_run()
    assert run.start()[1] == {"state": "ready"}
    found = json.loads((run.run_dir / "startup.json").read_text())
    assert found["waited_s"] is None
    assert found["summons_to_ready_s"] is None
    assert "ready in" in run.log()


@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_at_once_when_asked_while_it_waits(warm: Any, number: int, restarts: int) -> None:
    run, sidecar = warm(restarts)
    assert sidecar.answer() == {"state": "waiting"}
    begin = time.monotonic()
    sidecar.child.send_signal(number)
    assert sidecar.child.wait(90) == OK
    assert time.monotonic() - begin < 60
    assert run.status().state is State.STOPPED
    assert not (run.run_dir / "journal").exists()


def test_it_ends_in_order_and_cleans_up_when_the_supervisor_dies_while_it_waits(warm: Any) -> None:
    run, sidecar = warm()
    assert sidecar.answer() == {"state": "waiting"}
    os.close(sidecar.go)
    sidecar.go = -1
    assert sidecar.child.wait(90) == OK
    assert run.status().state is State.STOPPED
    assert not run.paths.run_file.exists()


def test_a_task_that_cannot_be_made_is_told_before_it_waits(warm: Any) -> None:
    run, sidecar = warm(task="no_such_module:Task", task_args={})
    answer = sidecar.answer()
    assert answer["state"] == "failed"
    assert "does not import" in answer["error"]
    assert sidecar.child.wait(90) == TASK_FAILED
    assert run.status().state is State.FAILED


@pytest.fixture
def pipe() -> Any:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(writing)


def test_a_warm_sidecar_that_nobody_needs_ends_like_one_without_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: Any
) -> None:
    monkeypatch.setattr(ending, "FIRST_OPERATOR_S", 0.1)
    idle = ending.Ending(RunPaths(tmp_path / "run.json"), 0.05)
    assert not idle.wait_for_go(pipe[0])
    assert "no rollout engine for 0.1 s" in idle.reason
    assert not idle.orphaned


def test_one_that_a_run_owns_does_not_end_for_idling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: Any
) -> None:
    monkeypatch.setattr(ending, "FIRST_OPERATOR_S", 0.1)
    owned = ending.Ending(RunPaths(tmp_path / "run.json"), 0.05, owned=True)
    threading.Timer(0.4, os.write, (pipe[1], b"g")).start()
    assert owned.wait_for_go(pipe[0])
    assert owned.reason == ""


@pytest.mark.parametrize("what", ["is_initialized", "has_started"])
def test_a_task_that_starts_cuda_is_refused_with_a_mocked_driver(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with untouched.untouched_gpu():
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
    monkeypatch.setattr(torch.cuda if what == "is_initialized" else untouched, what, lambda: True)
    with pytest.raises(PlacementError, match="CUDA had started"), untouched.untouched_gpu():
        pass


STEPS = """
import sys, time
from mps_trainer.config import load_settings
from mps_trainer.run import RunRecord
from mps_trainer.sidecar.phases import Phases
from mps_trainer.sidecar.startup import build_learning, prepare
settings = load_settings({"task_args": {"max_tokens": 64}})
words = dict(config="", derived_config="", run_dir=sys.argv[1], ray_namespace="", settings=settings.dump())
record = RunRecord(run_id="abcd1234", **words)
phases = Phases(time.monotonic())
prepared = prepare(record, settings, phases)
before = set(sys.modules)
build_learning(record, settings, prepared, None, phases)
print(*sorted(set(sys.modules) - before))
"""


def test_no_import_of_weight_is_left_for_after_the_summons(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    late = done.stdout.split()
    assert len(late) < 10, late


def test_phases_add_up_and_leave_the_waiting_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([14.0, 34.0, 35.0, 35.5])
    monkeypatch.setattr("mps_trainer.sidecar.phases.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    phases = Phases(10.0)
    phases.lap("imports")
    phases.waited()
    phases.lap("context")
    phases.ready(tmp_path)
    found = json.loads((tmp_path / "startup.json").read_text())
    assert found["phases_s"] == {"imports": 4.0, "context": 1.0, "rest": 0.5}
    assert (found["ready_s"], found["waited_s"], found["summons_to_ready_s"]) == (5.5, 20.0, 1.5)

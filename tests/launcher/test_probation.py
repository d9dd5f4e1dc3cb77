"""Probation through the real start of a run, with real processes on the CPU; the sidecar after it is a stand-in."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launcher_helpers import is_alive, wait_for

from mps_trainer.errors import PlacementError, RunError
from mps_trainer.launcher import probation
from mps_trainer.launcher.probation import Place, choose_place, is_wanted, longest_s, probation_environment
from mps_trainer.launcher.process import Ended
from mps_trainer.launcher.runs import end_runs, list_runs
from mps_trainer.launcher.up import RunHandle, prepare, start_run
from mps_trainer.mps.nvml import GpuFacts, GpuProcess, NvmlFacts
from mps_trainer.run import RunRecord, State, Status

SUPPORT = Path(__file__).parents[1] / "support"
GIB = 2**30
Write = Callable[..., Path]
Fake = Callable[[str], list[str]]


@pytest.fixture(autouse=True)
def tasks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))


def config_for(write_config: Write, task: str, **settings: object) -> Path:
    args = {"task": f'"{task}"', "probation": '"on"', "batch_size": 64, "probation_timeout": "200s", **settings}
    lines = "".join(f"          {key}: {value}\n" for key, value in args.items())
    return write_config(("          ring_slots: 2\n", f"          ring_slots: 2\n{lines}"))


def start(write_config: Write, fake: Fake, task: str, progress: Any = lambda _: None, **settings: object) -> RunHandle:
    config = config_for(write_config, task, **settings)
    return start_run(prepare(config), sidecar_command=fake("good"), progress=progress)


def refusal(write_config: Write, fake: Fake, tmp_path: Path, task: str, **settings: object) -> tuple[RunError, Path]:
    """The error of a start that must fail, and the run folder; no sidecar has started and nothing runs any more."""
    with pytest.raises(RunError) as caught:
        start(write_config, fake, f"tried_tasks:{task}", **settings)
    run_dir = (tmp_path / "ckpt" / "lab" / "run.mps-trainer" / "latest").resolve()
    assert not (run_dir / "fake.log").exists()
    assert Status.load(run_dir).state is State.FAILED
    assert caught.value.message in Status.load(run_dir).error
    assert list_runs() == []
    return caught.value, run_dir


def test_a_good_task_passes_before_the_sidecar_starts(write_config: Write, fake: Fake) -> None:
    lines: list[str] = []
    run = start(write_config, fake, "tried_tasks:Good", progress=lines.append)
    run.stop()
    kinds = [
        next((i for i, line in enumerate(lines) if word in line), -1) for word in ("at most 200 s", "passed", "READY")
    ]
    started = next(i for i, line in enumerate(lines) if "waiting until it is ready" in line)
    assert 0 <= kinds[0] < kinds[1] < started
    outcome = json.loads((run.run_dir / "probation.json").read_text())
    report = outcome["passed"]
    assert report["steps"] == 20
    assert 0 < report["step_ms"] <= report["longest_step_ms"]
    assert 0 < report["peak"] < GIB
    assert report["warnings"] == []
    assert re.search(r"passed: 20 steps of [\d.]+ ms, longest [\d.]+ ms, peak memory", "\n".join(lines))
    assert "Traceback" not in (run.run_dir / "probation.log").read_text()


def test_the_real_sidecar_starts_after_probation(write_config: Write) -> None:
    run = start_run(prepare(config_for(write_config, "tried_tasks:Good")))
    assert run.status().state is State.READY
    assert run.stop() is Ended.BY_ITSELF
    assert run.status().state is State.STOPPED
    log = (run.run_dir / "supervisor.log").read_text()
    assert log.index("probation passed") < log.index("sidecar")


def test_a_restart_needs_no_second_probation(write_config: Write, fake: Fake) -> None:
    run = start(write_config, fake, "tried_tasks:Good")
    os.kill(run.sidecar_pid, signal.SIGKILL)
    wait_for(lambda: run.status().state is State.READY and run.status().pid != run.sidecar_pid, "a second life")
    run.stop()
    assert (run.run_dir / "supervisor.log").read_text().count("probation of") == 1


@pytest.mark.parametrize(
    ("task", "message", "todo"),
    [
        ("Nan", r"task Nan, step 0: the loss is nan", "learning_rate"),
        ("WrongShape", r"must give a tensor of shape \(64,\)", "probation.log"),
        ("Exits", r"loss raised SystemExit: 5", "probation.log"),
        ("ExitsAtOnce", r"called sys\.exit\(5\) when it was imported or made", "__main__"),
        ("ExitsHard", r"crashed with exit code 0 \(training step 1 of 20, 64 experiences", r"os\._exit\(\)"),
        (
            "Aborts",
            r"(?s)crashed with signal SIGABRT \(scoring one experience .*length 0\).*in score",
            "broke its process",
        ),
    ],
)
def test_a_task_that_fails_fails_the_run(
    write_config: Write, fake: Fake, tmp_path: Path, task: str, message: str, todo: str
) -> None:
    error, run_dir = refusal(write_config, fake, tmp_path, task)
    assert re.search(message, error.message), error.message
    assert re.search(todo, error.todo), error.todo
    assert error.message.startswith("probation of")
    assert "passed" not in json.loads((run_dir / "probation.json").read_text())


def test_a_task_that_takes_more_than_memory_fails_with_what_to_raise(
    write_config: Write, fake: Fake, tmp_path: Path
) -> None:
    error, _ = refusal(write_config, fake, tmp_path, "TooLarge", memory="256MiB", replay_capacity=100)
    assert "can't allocate memory: you tried to allocate 4294967296 bytes" in error.message
    assert error.todo.startswith("raise memory:")


def test_a_task_that_hangs_is_ended_with_its_helpers_and_its_stack_is_told(
    write_config: Write, fake: Fake, tmp_path: Path
) -> None:
    error, run_dir = refusal(write_config, fake, tmp_path, "Hangs", probation_timeout="30s")
    assert "was not over after 30 s (training step 1 of 20" in error.message
    assert "tried_tasks.py" in error.message
    assert "in loss" in error.message
    helper = int(re.findall(r"helper (\d+)", (run_dir / "probation.log").read_text())[0])
    wait_for(lambda: not is_alive(helper), "the helper's end")


def test_a_run_can_be_ended_during_probation(write_config: Write, fake: Fake, tmp_path: Path) -> None:
    config = config_for(write_config, "tried_tasks:Hangs")
    errors: list[RunError] = []

    def begin() -> None:
        try:
            start_run(prepare(config), sidecar_command=fake("good"))
        except RunError as error:
            errors.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    log = tmp_path / "ckpt" / "lab" / "run.mps-trainer" / "latest" / "probation.log"
    wait_for(lambda: log.exists() and "helper" in log.read_text(), "probation")
    end_runs(list_runs(), timeout_s=90)
    thread.join(90)
    assert "ended before it was ready" in errors[0].message
    wait_for(lambda: not is_alive(int(re.findall(r"helper (\d+)", log.read_text())[0])), "the helper's end")


def test_up_prints_why_and_ends_with_2(write_config: Write) -> None:
    config = config_for(write_config, "tried_tasks:Nan")
    done = subprocess.run(
        [sys.executable, "-m", "mps_trainer", "up", str(config)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2
    assert "the loss is nan" in done.stdout + done.stderr
    assert "probation of tried_tasks:Nan on the CPU, outside MPS" in done.stdout + done.stderr


def record(device: str = "cuda:0", task: str = "my:Task", **settings: object) -> RunRecord:
    values = {"task": task, "probation": "auto", "probation_timeout": 60.0, "memory": 4 * GIB, "cpu_threads": 1}
    return RunRecord(
        run_id="0",
        config="",
        derived_config="",
        run_dir="",
        ray_namespace="",
        settings=values | settings,
        device=device,
    )


def test_by_default_it_is_for_a_users_task_on_a_gpu() -> None:
    assert is_wanted(record())
    assert is_wanted(record("cuda"))
    assert not is_wanted(record("cpu"))
    assert not is_wanted(record(task="preference_classifier"))
    assert is_wanted(record("cpu", task="preference_classifier", probation="on"))
    assert not is_wanted(record(probation="off"))
    assert longest_s(record()) > 60
    assert longest_s(record(probation="off")) == 0


GPU = GpuFacts(0, "GPU-0", "NVIDIA H200", 140 * GIB, GIB, "default", False)
BUSY = (GpuProcess(77, GIB, "python"),)


def test_the_place_is_the_runs_gpu_or_an_idle_one_by_recorded_nvml_values() -> None:
    two = NvmlFacts((GPU, replace(GPU, index=1, uuid="GPU-1", processes=BUSY)))
    assert choose_place(record("cpu"), two) == Place(None, "on the CPU")
    assert choose_place(record("cuda:1"), two).gpu == two.gpus[1]
    assert choose_place(record("cuda"), two).gpu == two.gpus[0]
    full = NvmlFacts((replace(GPU, used=136 * GIB), replace(GPU, index=1, uuid="GPU-1", processes=BUSY)))
    place = choose_place(record("cuda"), full)
    assert place.gpu is None
    assert "no idle GPU has 5.0 GiB free" in place.why
    with pytest.raises(PlacementError, match="there is no cuda:2: NVML sees 2 GPUs"):
        choose_place(record("cuda:2"), two)


def test_the_environment_is_outside_of_every_mps_daemon() -> None:
    shell = {
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/m",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    for mps in ("on", "off"):
        env = probation_environment(replace(record(), mps=mps), Place(GPU, ""), shell)
        assert {k: v for k, v in env.items() if "CUDA" in k and k != "CUDA_DEVICE_ORDER"} == {
            "CUDA_MPS_PIPE_DIRECTORY": "/dev/null",
            "CUDA_VISIBLE_DEVICES": "GPU-0",
            "CUDA_LAUNCH_BLOCKING": "1",
        }
    assert probation_environment(record(), Place(None, ""), shell)["CUDA_VISIBLE_DEVICES"] == ""


def test_the_sidecar_waits_until_the_process_is_gone_from_the_gpu_with_a_mocked_nvml(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = [NvmlFacts((replace(GPU, processes=BUSY),))] * 3 + [NvmlFacts((GPU,))]
    monkeypatch.setattr(probation, "read_nvml", lambda: readings.pop(0))
    waits: list[float] = []
    probation._wait_until_gone(Place(GPU, ""), 77, waits.append)  # type: ignore[arg-type]
    assert len(waits) == 3
    monkeypatch.setattr(probation, "read_nvml", lambda: NvmlFacts((replace(GPU, processes=BUSY),)))
    monkeypatch.setattr(probation, "_GONE_S", 0.0)
    with pytest.raises(PlacementError, match=r"\(77\) has ended, and NVML still shows it on GPU-0"):
        probation._wait_until_gone(Place(GPU, ""), 77, waits.append)  # type: ignore[arg-type]

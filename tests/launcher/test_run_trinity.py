"""`mps-trainer run` with real processes; `trinity` and the sidecar are stand-ins, so each test takes two seconds."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launcher_helpers import is_alive, wait_for

from mps_trainer.launcher.process import spawn
from mps_trainer.launcher.run_trinity import _pump
from mps_trainer.launcher.runs import list_runs
from mps_trainer.run import State, Status

Write = Callable[..., Path]
DRIVER = Path(__file__).with_name("run_driver.py")


@dataclass
class Driver:
    """A running run_driver.py."""

    process: subprocess.Popen[str]
    errors: Path

    def text(self) -> str:
        return self.errors.read_text()

    def trinity_pid(self) -> int:
        wait_for(lambda: re.search(r"fake trinity (\d+)", self.text()), f"trinity; {self.text()}")
        match = re.search(r"fake trinity (\d+)", self.text())
        assert match is not None
        return int(match[1])

    def verdict(self) -> dict[str, Any]:
        output, _ = self.process.communicate(timeout=90)
        assert output, self.text()
        answer: dict[str, Any] = json.loads(output)
        return answer


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., Driver]:
    def start(config: Path, *, sidecar: str = "good", trinity: str = "succeeds") -> Driver:
        errors = tmp_path / "driver.log"
        with errors.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, str(DRIVER), str(config), sidecar, trinity],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        return Driver(process, errors)

    return start


class Target:
    """A place for output that takes `good` chunks and then raises, as a closed pipe or a full disk does."""

    def __init__(self, good: int, error: int) -> None:
        self.good, self.error, self.bytes = good, error, 0

    def __call__(self, chunk: bytes) -> None:
        self.good -= 1
        if self.good < 0:
            raise OSError(self.error, os.strerror(self.error))
        self.bytes += len(chunk)


@pytest.mark.parametrize("broken", ["sink", "file", "both"])
def test_the_pipe_is_drained_whatever_fails_behind_it(tmp_path: Path, broken: str) -> None:
    # More than a pipe holds: a pump that gives up would leave the child blocked in its write.
    child = spawn([sys.executable, "-c", "print('x' * 3_000_000)"], env=os.environ, log=subprocess.PIPE)
    sink = Target(1 if broken != "file" else 10_000, errno.EPIPE)
    path = Path("/dev/full") if broken != "sink" else tmp_path / "console"
    _pump(child, path.open("wb"), sink)
    assert child.wait(90) == 0
    if broken == "file":
        assert sink.bytes == 3_000_001
    if broken == "sink":
        assert path.stat().st_size == 3_000_001


def last_status(tmp_path: Path) -> Status:
    return Status.load(tmp_path / "ckpt" / "lab" / "run.mps-trainer" / "latest")


def test_a_good_run_ends_with_everything_down(
    write_config: Write, drive: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = drive(write_config())
    assert driver.verdict()["exit_code"] == 0
    assert "with run.mps.yaml" in driver.text()
    assert list_runs() == []
    assert last_status(tmp_path).state is State.STOPPED
    console = tmp_path / "ckpt" / "lab" / "run.mps-trainer" / "latest" / "trinity.log"
    assert "fake trinity" in console.read_text()


def test_a_failure_that_trinity_hides_is_told(write_config: Write, drive: Callable[..., Driver]) -> None:
    verdict = drive(write_config(), trinity="fails-with-0").verdict()
    assert verdict["exit_code"] == 1
    assert any("Error in Explorer" in reason for reason in verdict["reasons"])
    assert "explorer did not reach step 2; its last checkpoint is of step 1" in verdict["reasons"]


def test_an_exit_status_of_trinity_is_passed_on(write_config: Write, drive: Callable[..., Driver]) -> None:
    assert drive(write_config(), trinity="fails-with-1").verdict()["exit_code"] == 1


def test_a_sidecar_that_failed_under_a_good_run(write_config: Write, drive: Callable[..., Driver]) -> None:
    verdict = drive(write_config(), sidecar="task-error-later").verdict()
    assert verdict["exit_code"] == 3
    assert "the loss is nan in step 7" in verdict["reasons"][0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_everything_ends(
    write_config: Write, drive: Callable[..., Driver], tmp_path: Path, number: signal.Signals
) -> None:
    driver = drive(write_config(), trinity="hangs")
    trinity = driver.trinity_pid()
    driver.process.send_signal(number)
    verdict = driver.verdict()
    assert verdict["exit_code"] == 130
    assert driver.text().count(f"got {number.name}") == 1
    assert not is_alive(trinity)
    assert last_status(tmp_path).state is State.STOPPED


def test_a_killed_driver_leaves_nothing(write_config: Write, drive: Callable[..., Driver], tmp_path: Path) -> None:
    driver = drive(write_config(), trinity="hangs")
    trinity = driver.trinity_pid()
    [run] = list_runs()
    assert run.supervisor is not None
    assert run.status is not None
    driver.process.kill()
    driver.process.wait()
    for pid in (trinity, run.supervisor.pid, run.status.pid):
        wait_for(lambda pid=pid: not is_alive(pid), f"the end of process {pid}")
    assert last_status(tmp_path).state is State.STOPPED


def test_a_killed_supervisor_leaves_nothing_and_is_told(
    write_config: Write, drive: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = drive(write_config(), trinity="takes-a-while")
    driver.trinity_pid()
    [run] = list_runs()
    assert run.supervisor is not None
    assert run.status is not None
    os.kill(run.supervisor.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(run.status.pid), "the end of the sidecar")
    (tmp_path / "ckpt" / "lab" / "run" / "finish").touch()
    verdict = driver.verdict()
    assert verdict["exit_code"] == 3, "Trinity finished, but not with its sidecar"
    assert "supervisor" in " ".join(verdict["reasons"])
    assert list_runs() == []


def test_a_killed_trinity_ends_the_run(write_config: Write, drive: Callable[..., Driver]) -> None:
    driver = drive(write_config(), trinity="hangs")
    subprocess.run(["kill", "-KILL", str(driver.trinity_pid())], check=True)
    verdict = driver.verdict()
    assert verdict["exit_code"] == 1
    assert "trinity run ended with signal SIGKILL" in verdict["reasons"]
    assert list_runs() == []


def test_a_disabled_operator_runs_the_users_own_file_and_starts_nothing(
    write_config: Write, drive: Callable[..., Driver], tmp_path: Path
) -> None:
    config = write_config(("ring_slots: 2", "enabled: false"))
    driver = drive(config, sidecar="crash-at-start")
    assert driver.verdict()["exit_code"] == 0
    assert "with run.yaml" in driver.text()
    assert not config.with_name("run.mps.yaml").exists()
    assert not (tmp_path / "ckpt" / "lab" / "run.mps-trainer").exists()

"""Operators that outlive their run: what they hold stays, is told, and goes at once when they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_helpers import segment_content

from mps_trainer.launcher.doctor import Check, Level, check_leftovers, check_waiting
from mps_trainer.launcher.leftovers import find_waiting, remove_leftovers
from mps_trainer.launcher.runs import end_runs
from mps_trainer.launcher.up import RunHandle, prepare, start_run
from mps_trainer.run import new_run_id, run_paths
from mps_trainer.transport import leftovers

Write = Callable[..., Path]
Fake = Callable[[str], list[str]]

_OPERATOR = """
import sys
from mps_trainer.columns import Column
from mps_trainer.transport import OperatorChannel, RingSettings

channels = [
    OperatorChannel.create(sys.argv[1], [Column(name="reward", source="reward")], RingSettings(2, 4096))
    for _ in range(int(sys.argv[2]))
]
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def operators() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that holds channels of a run, as an operator between two batches does."""
    started: list[subprocess.Popen[str]] = []

    def start(run_id: str, channels: int = 1) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _OPERATOR, run_id, str(channels)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def waiting_of(run_id: str) -> list[Check]:
    return [check for check in check_waiting() if run_id in check.found]


def start(write_config: Write, fake: Fake) -> RunHandle:
    return start_run(prepare(write_config()), sidecar_command=fake("good"))


def test_an_operator_that_is_killed_after_down_leaves_nothing(
    write_config: Write, fake: Fake, operators: Callable[..., subprocess.Popen[str]]
) -> None:
    run = start(write_config, fake)
    run_id = run.record.run_id
    one, two = operators(run_id, 2), operators(run_id)
    run.stop()
    assert len(leftovers(run_id)) == 10
    assert run.paths.run_file.exists()
    assert not run.paths.supervisor_lock.exists()

    remove_leftovers()
    assert len(leftovers(run_id)) == 10, "a living operator's objects were removed"
    [check] = waiting_of(run_id)
    assert check.level is Level.OK
    assert f"process {one.pid}, {two.pid}" in check.found or f"process {two.pid}, {one.pid}" in check.found

    one.kill()
    one.wait(90)
    # The doorbell says that somebody works for the run; that one may still hand over what the killed one left.
    [check] = waiting_of(run_id)
    assert f"process {two.pid} works" in check.found
    two.kill()
    two.wait(90)
    assert waiting_of(run_id) == []
    assert run_id in check_leftovers().found
    end_runs([])
    assert leftovers(run_id) == []
    assert not run.paths.run_file.exists()


def test_the_run_and_its_operator_killed_together_leave_nothing(
    write_config: Write, fake: Fake, operators: Callable[..., subprocess.Popen[str]]
) -> None:
    run = start(write_config, fake)
    run_id = run.record.run_id
    operator = operators(run_id)
    for pid in (run.supervisor.pid, run.sidecar_pid, operator.pid):
        os.kill(pid, signal.SIGKILL)
    run.supervisor.wait(90)
    operator.wait(90)
    assert leftovers(run_id)
    # The sidecar is nobody's child here; its lock says when it is gone.
    deadline = time.monotonic() + 90
    while leftovers(run_id):
        assert time.monotonic() < deadline
        end_runs([])
    assert not run.paths.run_file.exists()


def test_objects_that_wait_are_told_with_their_time() -> None:
    run_id, now = new_run_id(), time.time()
    segment, lone = Path(f"/dev/shm/mpst.{run_id}.0"), Path(f"/dev/shm/sem.mpst.{run_id}.7.s")
    try:
        for path, content in ((segment, segment_content(run_id)), (lone, b"x")):
            path.write_bytes(content)
            path.chmod(0o600)
        until = {item.path: item.until for item in find_waiting() if item.run_id == run_id}
        assert until == {segment: pytest.approx(now + 600, abs=60), lone: pytest.approx(now + 600, abs=60)}
        [check] = waiting_of(run_id)
        assert check.level is Level.WARNING
        assert "another state folder; until " in check.found
        # Known to be over: only what could just be in the making waits, and the run stays known for it.
        run_paths(run_id).run_file.write_text("{}")
        until = {item.path: item.until for item in find_waiting() if item.run_id == run_id}
        assert until == {lone: pytest.approx(now + 60, abs=30)}
        remove_leftovers()
        assert not segment.exists()
        assert lone.exists()
        assert run_paths(run_id).run_file.exists()
    finally:
        for path in (segment, lone):
            path.unlink(missing_ok=True)
    remove_leftovers()
    assert not run_paths(run_id).run_file.exists()

"""An end before READY, and helpers that a task forks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_sidecar import Run

from mps_trainer.run import State, Status, is_held
from mps_trainer.run.exit_codes import OK


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent))
    monkeypatch.setenv("TASK_MARK", str(tmp_path / "mark"))
    return tmp_path / "mark"


def wait_for(condition: Callable[[], bool], limit_s: float = 90) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end_while_it_hangs(run: Run, mark: Path, number: int) -> int:
    """Send the signal once the task hangs; the exit code."""
    starting = threading.Thread(target=run.start)
    starting.start()
    wait_for(lambda: bool(run.children) and mark.exists())
    run.children[0].send_signal(number)
    code = run.children[0].wait(90)
    starting.join(90)
    return code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_task_that_hangs_at_the_start_does_not_delay_the_end(make_run: Any, mark: Path, number: int) -> None:
    run = make_run(task="broken_tasks:HangsInBuild", task_args={})
    assert end_while_it_hangs(run, mark, number) == OK
    assert run.status().state is State.STOPPED
    assert "before READY" in run.log()


def test_a_status_that_cannot_be_written_makes_no_other_end(make_run: Any, mark: Path) -> None:
    run = make_run(task="broken_tasks:HangsInBuild", task_args={})
    (run.run_dir / "status.json").mkdir()
    assert end_while_it_hangs(run, mark, signal.SIGTERM) == OK


def test_a_successor_that_is_ended_before_ready_is_no_end_in_order(make_run: Any, mark: Path) -> None:
    run = make_run(task="broken_tasks:HangsInBuild", task_args={})
    Status(run_id=run.run_id, state=State.RESTARTING, restarts=1).save(run.run_dir)
    assert end_while_it_hangs(run, mark, signal.SIGTERM) == 128 + signal.SIGTERM
    assert run.status().state is State.STARTING


def test_a_forked_helper_neither_holds_the_lock_nor_ignores_signals(make_run: Any, mark: Path) -> None:
    run = make_run(task="broken_tasks:ForksInBuild", task_args={})
    first, ready = run.start()
    assert ready == {"state": "ready"}
    first.kill()
    first.wait(90)
    helper = int(mark.read_text())
    try:
        assert Path(f"/proc/{helper}").exists()
        assert not is_held(run.paths.sidecar_lock)
        successor, ready = run.start()
        assert ready == {"state": "ready"}
        successor.send_signal(signal.SIGTERM)
        assert successor.wait(90) == OK
    finally:
        for pid in map(int, mark.read_text().split()):
            os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not _runs(helper))


def _runs(pid: int) -> bool:
    # An orphan may stay as a zombie, where nobody collects it.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

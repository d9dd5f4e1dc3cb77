"""`down` while `up` still starts, and a state folder that is cleaned while a run lives: both say what happened."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launcher_helpers import wait_for

from mps_trainer.errors import RunError
from mps_trainer.launcher import up
from mps_trainer.launcher.runs import list_runs
from mps_trainer.launcher.up import prepare, start_run
from mps_trainer.run import State

Write = Callable[..., Path]
Fake = Callable[[str], list[str]]
SAID = "ended before it was ready: asked with SIGTERM, as `mps-trainer down` does"


def terminate_me(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_down_while_up_holds_the_locks_itself(write_config: Write, fake: Fake) -> None:
    config = write_config()
    with pytest.raises(RunError, match=SAID):
        start_run(prepare(config), sidecar_command=fake("good"), progress=terminate_me)
    assert list_runs() == []
    assert not config.with_name("run.mps.yaml").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_down_at_the_instant_of_the_supervisors_start_leaves_no_supervisor(
    write_config: Write, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    usual = up.spawn

    def spawn(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(usual(*args, **options))
        terminate_me()
        return started[0]

    monkeypatch.setattr(up, "spawn", spawn)
    with pytest.raises(RunError, match=SAID):
        start_run(prepare(write_config()), sidecar_command=fake("good"))
    assert started[0].poll() is not None
    assert list_runs() == []


def test_down_before_the_supervisor_listens(write_config: Write, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, signal, sys
from mps_trainer.launcher import supervisor as module
usual = module.hold_run_locks
def hold(*args):
    held = usual(*args)
    os.kill(os.getpid(), signal.SIGTERM)
    return held
module.hold_run_locks = hold
sys.exit(module.main())
"""
    monkeypatch.setattr(up, "SUPERVISOR_COMMAND", (sys.executable, "-c", code))
    with pytest.raises(RunError, match=SAID):
        start_run(prepare(write_config()), sidecar_command=fake("good"))
    assert list_runs() == []


def test_a_run_file_that_was_removed_is_written_again(write_config: Write, fake: Fake) -> None:
    run = start_run(prepare(write_config()), sidecar_command=fake("good"))
    content = run.paths.run_file.read_text()
    run.paths.run_file.unlink()
    wait_for(run.paths.run_file.exists, "the run file")
    assert run.paths.run_file.read_text() == content
    assert "written again" in (run.run_dir / "supervisor.log").read_text()
    run.stop()
    assert run.status().error == ""
    assert not run.paths.run_file.exists()


@pytest.mark.parametrize("removed", ["lock", "folder"])
def test_a_lock_that_was_removed_ends_the_run_in_order_with_the_reason(
    write_config: Write, fake: Fake, state: Path, removed: str
) -> None:
    run = start_run(prepare(write_config()), sidecar_command=fake("good"))
    if removed == "lock":
        run.paths.supervisor_lock.unlink()
    else:
        shutil.rmtree(state)
    assert run.supervisor.wait(90) == 0
    status = run.status()
    assert status.state is State.STOPPED
    assert "was removed while the run lived" in status.error
    assert "was removed while the run lived" in (run.run_dir / "supervisor.log").read_text()

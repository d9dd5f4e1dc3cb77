"""Locks with real processes: a killed holder, also as a zombie, is noticed at once."""

import os
import signal
import subprocess
import sys

import pytest

from mps_trainer.errors import RunError
from mps_trainer.run import RunPaths, RunRecord, holder_note, is_held, live_runs, run_paths, state_dir, try_hold

HOLD = """
import sys
from pathlib import Path
from mps_trainer.run import try_hold
lock = try_hold(Path(sys.argv[1]), "pid of the child")
print("held" if lock else "refused", flush=True)
sys.stdin.read()
"""


def hold_in_child(path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    return child


def test_a_zombie_holds_nothing(tmp_path):
    path = tmp_path / "x.lock"
    child = hold_in_child(path)
    assert is_held(path)
    assert try_hold(path) is None
    assert holder_note(path) == "pid of the child"
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped: kill(pid, 0) still succeeds
    os.kill(child.pid, 0)
    assert not is_held(path)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    with try_hold(path) as lock:
        assert lock is not None


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        try_hold(tmp_path / "link")


def record(**changes) -> RunRecord:
    base = {"run_id": "abcd1234", "config": "/c", "derived_config": "/d", "run_dir": "/r", "ray_namespace": "n"}
    return RunRecord(**{**base, "settings": {}, **changes})


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("MPS_TRAINER_STATE_DIR", str(tmp_path / "state"))
    return state_dir()


def test_only_runs_with_a_living_holder_are_found(state):
    paths = run_paths("abcd1234")
    record().save(paths.run_file)
    assert paths.run_file.stat().st_mode & 0o777 == 0o600
    assert list(live_runs()) == []
    with try_hold(paths.supervisor_lock):
        assert [r for _, r in live_runs()] == [record()]
    paths.remove()
    assert list((state / "runs").iterdir()) == []


def test_a_state_folder_that_others_can_read_is_refused(state):
    state.chmod(0o755)
    with pytest.raises(RunError, match="not a folder of yours alone"):
        state_dir()


def test_a_missing_or_broken_run_file_says_what_to_do(tmp_path):
    with pytest.raises(RunError, match="start_mps"):
        RunRecord.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(RunError, match="is no run file"):
        RunRecord.load(tmp_path / "bad.json")
    assert RunPaths(tmp_path / "a.json").sidecar_lock.name == "a.sidecar.lock"

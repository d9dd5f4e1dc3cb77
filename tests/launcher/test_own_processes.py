"""Processes that end in order, and only ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_helpers import wait_for

from mps_trainer.launcher import process
from mps_trainer.launcher.process import Ended, describe_exit, spawn, stop, stop_identity
from mps_trainer.launcher.ray_cluster import stop_tree
from mps_trainer.run.process import ProcessIdentity

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(300)"
)


def python(code: str, log: Path, **kwargs: bool) -> subprocess.Popen[bytes]:
    return spawn([sys.executable, "-c", code], env=os.environ, log=log, **kwargs)  # type: ignore[arg-type]


def test_a_child_that_listens_ends_by_itself(tmp_path: Path) -> None:
    child = python("import time; time.sleep(300)", tmp_path / "log")
    assert stop(child, grace_s=90) is Ended.BY_ITSELF
    assert stop(child, grace_s=90) is Ended.ALREADY


def test_a_stubborn_child_is_stopped_then_killed(tmp_path: Path) -> None:
    child = python(STUBBORN, tmp_path / "log")
    wait_for(lambda: (tmp_path / "log").read_text(), "the child")
    started = time.monotonic()
    assert stop(child, grace_s=0.2, gpu_drain_s=0.3) is Ended.KILLED
    assert child.returncode == -signal.SIGKILL
    assert 0.5 <= time.monotonic() - started < 60


def test_a_child_that_outlives_sigkill_is_not_waited_for_without_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As one in the hands of a driver (state D), which nobody can make without one.
    child = python(STUBBORN, tmp_path / "log")
    wait_for(lambda: (tmp_path / "log").read_text(), "the child")
    with monkeypatch.context() as patch:
        patch.setattr(process, "KILL_SECONDS", 0.2)
        patch.setattr(child, "kill", lambda: None)
        assert stop(child, grace_s=0.2) is Ended.STILL_ALIVE
    assert stop(child, grace_s=0) is Ended.KILLED


def test_a_child_that_deserves_more_time_gets_it(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, lambda *_: (time.sleep(0.6), exit(0))); print(1, flush=True)"
    child = python(f"{code}; time.sleep(300)", tmp_path / "log")
    wait_for(lambda: (tmp_path / "log").read_text(), "the child")
    assert stop(child, grace_s=0.2, more_s=lambda: 90.0) is Ended.BY_ITSELF
    assert child.returncode == 0


def test_a_name_that_is_no_text_hides_no_process(tmp_path: Path) -> None:
    code = r"import ctypes, time; ctypes.CDLL(None).prctl(15, b'k\xc3'); print(1, flush=True); time.sleep(300)"
    child = python(code, tmp_path / "log")
    wait_for(lambda: (tmp_path / "log").read_text(), "the child")
    assert b"k\xc3" in Path(f"/proc/{child.pid}/stat").read_bytes()
    assert ProcessIdentity.of(child.pid) is not None
    child.kill()
    child.wait()


def test_another_process_with_the_same_pid_is_left_alone(tmp_path: Path) -> None:
    child = python("import time; time.sleep(300)", tmp_path / "log")
    real = ProcessIdentity.of(child.pid)
    assert real is not None
    predecessor = ProcessIdentity(child.pid, real.start_ticks - 1)
    assert stop_identity(predecessor, grace_s=0.1) is Ended.ALREADY
    assert child.poll() is None
    assert stop_identity(real, grace_s=90) is Ended.BY_ITSELF
    child.wait()


def test_a_process_that_somebody_stopped_ends_when_asked(tmp_path: Path) -> None:
    child = python("import time; time.sleep(300)", tmp_path / "log")
    identity = ProcessIdentity.of(child.pid)
    assert identity is not None
    child.send_signal(signal.SIGSTOP)
    try:
        assert stop_identity(identity, grace_s=90) is Ended.BY_ITSELF
    finally:
        child.kill()
        child.wait()


def test_a_zombie_is_no_process(tmp_path: Path) -> None:
    child = python("pass", tmp_path / "log")
    wait_for(lambda: ProcessIdentity.of(child.pid) is None, "the zombie")
    child.wait()


def test_a_tied_child_ends_with_its_parent(tmp_path: Path) -> None:
    parent_code = f"""
import os, sys, time
from pathlib import Path
from mps_trainer.launcher.process import spawn
child = spawn([sys.executable, "-c", "import time; print('on', flush=True); time.sleep(300)"], env=os.environ,
              log=Path({str(tmp_path / "child")!r}), dies_with_us=True)
print(child.pid, flush=True)
time.sleep(300)
"""
    parent = python(parent_code, tmp_path / "parent")
    wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), "the child")
    pid = int((tmp_path / "parent").read_text())
    assert ProcessIdentity.of(pid) is not None
    parent.kill()
    parent.wait()
    wait_for(lambda: ProcessIdentity.of(pid) is None, "the end of the child")


def test_a_tree_is_ended_with_the_orphans_of_its_session(tmp_path: Path) -> None:
    # The middle process dies, so that the last one is nobody's child, as with Ray's workers.
    code = f"""
import subprocess, sys, time
subprocess.run([sys.executable, "-c", '''
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid, flush=True)
'''])
{STUBBORN}
"""
    head = python(code, tmp_path / "log")
    wait_for(lambda: "on" in (tmp_path / "log").read_text(), "the tree")
    orphan = int((tmp_path / "log").read_text().split()[0])
    assert ProcessIdentity.of(orphan) is not None
    stop_tree(head, grace_s=0.2)
    assert ProcessIdentity.of(orphan) is None
    assert head.poll() is not None


def test_exits_are_described() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-11) == "signal SIGSEGV"

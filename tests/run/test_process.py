"""Processes by identity, with real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from mps_trainer.run.process import ProcessIdentity, ancestors, is_descendant


def child(code="input()"):
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_zombie_is_not_running_and_is_waited_for():
    process = child()
    found = ProcessIdentity.of(process.pid)
    assert found.is_running
    assert not found.wait(0.05)
    assert found.send(signal.SIGKILL)
    assert found.wait(90)
    assert not found.is_running
    assert found.state == "Z"
    process.communicate()
    assert found.state == ""
    assert ProcessIdentity.of(process.pid) != found
    assert not found.send(signal.SIGKILL)


def test_a_process_with_the_same_pid_and_another_start_is_left_alone():
    process = child()
    try:
        other = ProcessIdentity(process.pid, ProcessIdentity.of(process.pid).start_ticks + 1)
        assert not other.is_running
        assert not other.send(signal.SIGKILL)
        assert other.wait(0.1)
    finally:
        process.communicate("\n")
    assert process.returncode == 0


def test_a_zombie_is_nobody():
    process = child()
    found = ProcessIdentity.of(process.pid)
    found.send(signal.SIGKILL)
    assert found.wait(90)
    assert ProcessIdentity.of(process.pid) is None
    process.communicate()


def test_a_name_that_is_no_text_hides_nobody():
    # PR_SET_NAME (15) cuts at 15 bytes, so half of a letter is nothing unusual.
    renamed = "import ctypes; ctypes.CDLL(None).prctl(15, b'k) R 1 \\xc3', 0, 0, 0); print('on', flush=True); input()"
    process = child(renamed)
    try:
        assert process.stdout.readline() == "on\n"
        found = ProcessIdentity.of(process.pid)
        assert found.is_running
        assert next(iter(ancestors(process.pid))) == os.getpid()
    finally:
        process.communicate("\n")


def test_what_proc_does_not_show_is_nobody(monkeypatch):
    def hidden(path):
        raise PermissionError(13, "hidepid=1", str(path))

    monkeypatch.setattr(Path, "read_bytes", hidden)
    assert ProcessIdentity.of(1) is None
    assert not is_descendant(4711, os.getpid())


def test_descendants_are_told_from_strangers():
    process = child("import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()']).pid); input()")
    grandchild = int(process.stdout.readline())
    try:
        assert is_descendant(grandchild, process.pid)
        assert is_descendant(grandchild, os.getpid())
        assert not is_descendant(process.pid, grandchild)
        assert next(iter(ancestors(grandchild))) == process.pid
        assert list(ancestors(2**22 + 1)) == []
    finally:
        process.communicate("\n\n")

"""Processes by identity, with real processes."""

import os
import signal
import subprocess
import sys
import time

from mps_trainer.mps.process import ProcessIdentity, ancestors, is_descendant


def child(code="input()"):
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_zombie_is_not_running_and_is_waited_for():
    process = child()
    found = ProcessIdentity.of(process.pid)
    assert found.is_running
    assert not found.wait(0.05)
    assert found.send(signal.SIGKILL)
    assert found.wait(5)
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
        assert not other.kill_drained(0.1)
        assert other.wait(0.1)
    finally:
        process.communicate("\n")
    assert process.returncode == 0


def test_kill_drained_stops_first_and_kills_after_the_drain():
    process = child()
    found = ProcessIdentity.of(process.pid)
    states = []

    def watched(timeout_s):
        time.sleep(timeout_s)
        states.append(found.state)
        return False

    object.__setattr__(found, "wait", watched)
    assert found.kill_drained(0.2)
    assert states == ["T"]
    process.communicate()
    assert process.returncode == -signal.SIGKILL


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

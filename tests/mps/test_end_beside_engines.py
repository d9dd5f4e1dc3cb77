"""The sidecar's memory does not change while an engine measures: ends, restarts, and ends between two lives.

Whole runs; the GPU is recorded, the control binary, the sidecar and the engine's side of the socket are stand-ins.
"""

import json
import os
import signal
import subprocess
import threading
import time

import pytest
from mps_helpers import UUIDS, supervisor_log, wait_for

from mps_trainer.errors import PlacementError
from mps_trainer.launcher.entrance import close_to_engines, wait_to_enter, why_no_last_sidecar
from mps_trainer.launcher.server_watch import ServerWatch
from mps_trainer.launcher.wakeups import Wakeups
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.summons import EngineRequest, EngineSession
from mps_trainer.run import State, exit_codes


def session(run, timeout_s=90):
    return EngineSession(mps_folder(run.record.run_id).summons_socket, EngineRequest((UUIDS[0],), "rollout"), timeout_s)


def notes(run):
    return [line.split()[0] for line in (run.run_dir / "fake.log").read_text().splitlines()]


def test_engine_is_not_told_to_join_while_the_fake_sidecar_is_being_ended(start):
    run = start("cuda:0", 1, "stubborn")
    os.kill(run.supervisor.pid, signal.SIGTERM)
    wait_for(lambda: "SIGTERM" in notes(run))
    heard = []
    engine = threading.Thread(target=lambda: heard.append(session(run).answer))
    engine.start()
    engine.join(1)
    assert heard == [], "it waits until the memory has stopped changing"
    os.kill(run.sidecar_pid, signal.SIGKILL)
    engine.join(90)
    assert not heard[0].join
    run.supervisor.wait(90)


def test_end_of_the_run_waits_for_a_fake_engine_that_was_told_to_join(start):
    run = start("cuda:0", 1)
    engine = session(run)
    assert engine.answer.join
    os.kill(run.supervisor.pid, signal.SIGTERM)
    wait_for(lambda: "ending sidecar" in supervisor_log(run))
    late = []
    other = threading.Thread(target=lambda: late.append(session(run).answer))
    other.start()
    other.join(1.5)
    assert (notes(run), late) == (["start"], [])
    engine.tell("ready")
    run.supervisor.wait(90)
    other.join(90)
    engine.close()
    assert notes(run) == ["start", "SIGTERM", "saved"]
    assert not late[0].join
    assert run.status().state is State.STOPPED


@pytest.mark.slow
def test_end_between_two_lives_starts_no_sidecar_under_a_fake_engine_that_measures(start):
    run = start("cuda:0", 1)
    engine = session(run)
    os.kill(run.sidecar_pid, signal.SIGKILL)
    wait_for(lambda: "waits: an engine that was told to join is measuring memory" in run.status().error)
    os.kill(run.supervisor.pid, signal.SIGTERM)
    run.supervisor.wait(90)
    engine.close()
    assert notes(run) == ["start"]
    assert run.status().state is State.FAILED
    assert "ended without a last sidecar: an engine that was told to join" in run.status().error


def test_end_between_two_lives_starts_the_last_sidecar_once_the_fake_engine_is_up(start):
    run = start("cuda:0", 1)
    engine = session(run)
    os.kill(run.sidecar_pid, signal.SIGKILL)
    wait_for(lambda: "waits: an engine" in run.status().error)
    os.kill(run.supervisor.pid, signal.SIGTERM)
    engine.tell("ready")
    run.supervisor.wait(90)
    engine.close()
    assert notes(run) == ["start", "start", "SIGTERM", "saved"]
    assert run.status().state is State.STOPPED


@pytest.fixture
def questions(start, state):
    """How often the fake control binary of the runs to come was started so far."""
    control, counted = state / "bin" / "nvidia-cuda-mps-control", state / "questions"
    (state / "bin" / "real").mkdir()
    control.rename(state / "bin" / "real" / control.name)
    control.write_text(f'#!/bin/sh\necho >> {counted}\nexec {state}/bin/real/{control.name} "$@"\n')
    control.chmod(0o700)
    return lambda: counted.read_text().count("\n")


def test_fake_server_that_has_not_recovered_is_asked_now_and_then(start, state, monkeypatch, questions):
    answers = state / "answers.json"
    answers.write_text(json.dumps({"get_server_list": "77\n", "get_server_status 77": "FAULT\n"}))
    monkeypatch.setenv("FAKE_MPS_ANSWERS", str(answers))
    run = start("cuda:0", 1)
    os.kill(run.sidecar_pid, signal.SIGKILL)
    wait_for(lambda: "the MPS server (process 77) takes no clients: FAULT" in run.status().error)
    before, begin = questions(), time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run.supervisor.wait(3)
    # A look of two questions every two seconds; asked at each waking it was 20 and more in three seconds.
    assert questions() - before <= time.monotonic() - begin + 4
    answers.write_text(json.dumps({"get_server_list": "77\n", "get_server_status 77": "ACTIVE\n"}))
    wait_for(lambda: run.status().state is State.READY)
    run.stop()


class CountingDaemon(MpsDaemon):
    asked = 0

    def servers(self):
        self.asked += 1
        return []


def test_an_answer_on_the_server_is_kept_for_a_while_and_forgotten_with_a_client(state):
    daemon = CountingDaemon(mps_folder("abcd1234"))
    watch = ServerWatch(daemon)
    assert {watch.trouble() for _ in range(50)} == {""}
    assert daemon.asked == 1
    watch.forget()
    watch.trouble()
    assert daemon.asked == 2


class FakeShare:
    """A share whose obstacles are told one after another; the last one stays."""

    refusal = None

    def __init__(self, *obstacles, occupied=False, must_not_change=False):
        self.obstacles = list(obstacles)
        self.is_occupied = occupied
        self.must_not_change = must_not_change
        self.told = ""

    def obstacle(self):
        return self.obstacles.pop(0) if len(self.obstacles) > 1 else self.obstacles[0]

    def sidecar_is_gone(self, why, *, for_good):
        self.told = why


class FakeChild:
    @staticmethod
    def poll():
        return None


class FakeSidecar:
    child = FakeChild


@pytest.fixture
def wakeups():
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP
    before = {number: signal.getsignal(number) for number in numbers}
    looks = []
    made = Wakeups("", lambda: looks.append(1))
    made.looks = looks
    yield made
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_stranger_is_waited_for_longer_than_any_limit(wakeups):
    told = []
    share = FakeShare(*["process 7 computes"] * 4, "")
    share.is_occupied = True
    assert wait_to_enter(share, wakeups, told.append, limit_s=0.0) is None
    assert told == ["process 7 computes"]
    assert len(wakeups.looks) == 4


def test_a_server_that_does_not_recover_ends_the_run_with_the_reason(wakeups):
    refused = wait_to_enter(FakeShare("the MPS server is FAULT"), wakeups, lambda _: None, limit_s=0.0)
    assert "the MPS server is FAULT" in refused.error
    assert refused.code == 1


def test_a_stranger_with_mps_on_ends_the_run_between_two_lives_too(wakeups):
    share = FakeShare("process 7 computes", occupied=True)
    share.refusal = PlacementError("mps: on is not possible any more", "mps: auto")
    refused = wait_to_enter(share, wakeups, lambda _: None)
    assert refused == ("mps: on is not possible any more", "mps: auto", exit_codes.BAD_CONFIG)


def test_a_run_that_is_asked_to_end_waits_no_longer_to_start(wakeups):
    share = FakeShare("busy", occupied=True)
    refused = wait_to_enter(share, wakeups, lambda _: wakeups.ask_to_end("down"))
    assert refused is not None
    assert not refused.error
    assert "without a last sidecar: busy" in why_no_last_sidecar(share, wakeups, patience_s=0.1)
    assert why_no_last_sidecar(FakeShare("busy", ""), wakeups, patience_s=5.0) == ""


def test_patience_with_an_engine_has_a_limit(wakeups, caplog):
    share = FakeShare("", must_not_change=True)
    close_to_engines(share, FakeSidecar, wakeups, patience_s=0.1)
    assert share.told
    assert "although an engine still measures memory" in caplog.text

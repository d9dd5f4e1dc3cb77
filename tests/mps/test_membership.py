"""Which engines are clients, and a daemon that does not say it. The daemon is fake."""

import os
from types import SimpleNamespace
from unittest.mock import Mock

from mps_helpers import FAKE_CONTROL, UUIDS, join, supervisor_log, wait_for
from test_two_gpus import RAY

from mps_trainer.errors import PlacementError
from mps_trainer.launcher.membership import Membership
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.summons import EngineRecord, EngineRequest
from mps_trainer.run import State
from mps_trainer.run.members import Member, load_members


class MuteDaemon(MpsDaemon):
    asked = 0

    def clients(self):
        self.asked += 1
        raise PlacementError("the MPS daemon did not answer 'ps'", "wait")


def engine(pid):
    return EngineRecord(EngineRequest((UUIDS[0],), "rollout", pid), "ready")


def test_run_with_a_fake_daemon_that_does_not_answer_goes_on(start, monkeypatch):
    monkeypatch.setenv("FAKE_MPS_HANG", "ps")
    run = start("cuda:0", 1)
    join(run, "0", **RAY)
    wait_for(lambda: "nobody can say which engines are MPS clients" in supervisor_log(run))
    assert run.supervisor.poll() is None
    assert run.status().state is State.READY
    run.stop()
    assert run.supervisor.returncode == 0
    assert run.status().state is State.STOPPED


def test_mute_daemon_is_asked_now_and_then_and_given_up(state, caplog, tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("mps_trainer.launcher.membership.time", SimpleNamespace(monotonic=lambda: clock[0]))
    daemon = MuteDaemon(mps_folder("abcd1234"), str(FAKE_CONTROL))
    membership = Membership(daemon, tmp_path, every_s=1.0)
    membership.prove([engine(11)])
    membership.prove([engine(11)])
    assert daemon.asked == 1
    for _ in range(20):
        clock[0] += 0.5
        membership.prove([engine(11)])
    assert "not proven to be an MPS client" in caplog.text
    asked = daemon.asked
    assert asked == 5
    clock[0] += 100
    membership.prove([engine(11)])
    assert daemon.asked == asked
    membership.prove([engine(11), engine(12)])
    assert daemon.asked == asked + 1, "the next engine is asked for again"
    assert load_members(tmp_path) == [Member("rollout", 11, None)], "the status does not claim it"


class HonestDaemon(MpsDaemon):
    def clients(self):
        return [Mock(pid=os.getpid())]


def test_proven_and_unproven_engines_are_named_for_the_status(state, tmp_path):
    ours = os.getpid()
    Membership(HonestDaemon(mps_folder("abcd1234"), str(FAKE_CONTROL)), tmp_path).prove([engine(ours), engine(2**22)])
    assert [(member.pid, member.proven) for member in load_members(tmp_path)] == [(ours, True), (2**22, False)]

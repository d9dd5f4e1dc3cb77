"""Engines and the supervisor of a run, over real sockets; the GPU is recorded, the daemon is fake."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from mps_helpers import FAKE_CONTROL, wait_for
from test_checks import H200

from mps_trainer.errors import AlreadyRunningError, PlacementError
from mps_trainer.launcher.gpu_share import GpuShare
from mps_trainer.mps.checks import Surroundings
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.lease import take_gpu
from mps_trainer.mps.nvml import NvmlFacts
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.mps.summons import EngineAnswer, EngineRequest, EngineSession, SummonsServer

OTHER = replace(H200, index=1, uuid="GPU-11111111-565d-9b0a-543c-d4b754f70410")
RUN = "abcd1234"
GIB = 2**30


@pytest.fixture
def folder(state):
    found = mps_folder(RUN)
    found.make()
    return found


@pytest.fixture
def share(state):
    shares = []

    def make(device, *, gpus=(H200, OTHER), answer_s=60.0, memory=8 * GIB):
        def look():
            return Surroundings(NvmlFacts(gpus, "580.159.04"), mps_folder(RUN), "/bin/true", env={})

        made = GpuShare(RUN, device, memory, binary=str(FAKE_CONTROL), look=look, answer_s=answer_s)
        shares.append(made)
        return made

    yield make
    for made in shares:
        made.close()


def ask(gpus, actor="explorer_rollout_model_0_0", timeout_s=90):
    return EngineSession(mps_folder(RUN).summons_socket, EngineRequest(tuple(gpus), actor), timeout_s)


def test_an_engine_reports_its_start_and_is_known_until_it_is_up(folder):
    server = SummonsServer(folder.summons_socket, lambda request: EngineAnswer(True, "come", "/pipe", 0.5))
    try:
        session = ask(["GPU-a"])
        assert session.answer == EngineAnswer(True, "come", "/pipe", 0.5)
        assert server.engines[0].state == "starting"
        session.tell("config", wished=0.9, utilization=0.5)
        session.tell("ready")
        wait_for(lambda: server.engines[0].state == "ready")
        (engine,) = server.engines
        assert (engine.wished, engine.utilization, engine.request.pid) == (0.9, 0.5, os.getpid())
        session.close()
        assert folder.summons_socket.stat().st_mode & 0o777 == 0o600
    finally:
        server.close()
    assert not folder.summons_socket.exists()


def test_an_engine_that_dies_while_it_starts_hangs_up_by_itself(folder):
    server = SummonsServer(folder.summons_socket, lambda request: EngineAnswer(True, "come", "/pipe"))
    code = (
        "import sys\nfrom pathlib import Path\nfrom mps_trainer.mps.summons import *\n"
        "s = EngineSession(Path(sys.argv[1]), EngineRequest(('GPU-a',)), 60.0)\n"
        "print(s.answer.join, flush=True)\ninput()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, folder.summons_socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "True\n"
        assert server.engines[0].request.pid == child.pid
        child.kill()
        wait_for(lambda: server.engines[0].state == "gone")
    finally:
        child.communicate()
        server.close()


def test_without_a_supervisor_or_with_a_slow_one_the_engine_starts_alone(folder):
    assert not ask(["GPU-a"]).answer.join
    release = threading.Event()

    def slow(request):
        release.wait(90)
        return EngineAnswer(True, "too late")

    server = SummonsServer(folder.summons_socket, slow)
    try:
        before = time.monotonic()
        answer = ask(["GPU-a"], timeout_s=0.2).answer
        assert not answer.join
        assert "did not answer within" in answer.reason
        assert time.monotonic() - before < 60
    finally:
        release.set()
        server.close()


@pytest.mark.parametrize("line", ["", "{", "[]", '{"gpus": 3}', json.dumps({"gpus": ["x"] * 20000})])
def test_nonsense_on_the_socket_is_no_engine(folder, line):
    server = SummonsServer(folder.summons_socket, lambda request: EngineAnswer(True, "come"))
    try:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(folder.summons_socket))
            raw.sendall(line.encode() + b"\n")
            with contextlib.suppress(ConnectionResetError):
                raw.shutdown(socket.SHUT_WR)
                assert raw.recv(1000) == b""
        assert server.engines == []
    finally:
        server.close()


def test_fake_daemon_engine_on_the_wanted_gpu_waits_for_the_sidecar_and_joins(share):
    made = share("cuda:0")
    made.start()
    assert made.is_placed
    placement = GpuPlacement.load(mps_folder(RUN))
    assert placement.gpu_uuid == H200.uuid
    assert placement.pool == 8 * GIB
    assert placement.limit > placement.pool
    ready = []
    threading.Timer(0.3, lambda: (ready.append(True), made.sidecar_is_ready())).start()
    answer = ask([H200.uuid]).answer
    assert ready, "it did not wait"
    assert answer.join
    assert answer.pipe_dir == str(mps_folder(RUN).pipe_dir)
    assert 0.85 < answer.utilization < 0.95
    assert made.must_not_change or made.engines[0].state == "gone"


def test_fake_daemon_engine_on_another_gpu_is_left_as_it_is(share):
    made = share("cuda:1")
    made.start()
    made.sidecar_is_ready()
    answer = ask([H200.uuid]).answer
    assert not answer.join
    assert answer.utilization is None
    assert "another GPU" in answer.reason
    assert ask([OTHER.uuid, H200.uuid]).answer.join


def test_fake_daemon_first_rollout_engine_summons_the_sidecar_and_others_do_not(share):
    made = share("cuda")
    woken = threading.Event()
    made.wake = woken.set
    made.start()
    assert not made.is_placed
    assert "no rollout engine" in ask([H200.uuid], actor="explorer_auxiliary_0_model_0_0").answer.reason
    assert not made.is_placed
    results = []
    thread = threading.Thread(target=lambda: results.append(ask([OTHER.uuid]).answer))
    thread.start()
    assert woken.wait(90)
    assert made.is_placed
    assert GpuPlacement.load(mps_folder(RUN)).gpu_uuid == OTHER.uuid
    made.sidecar_is_ready()
    thread.join(90)
    assert results[0].join


@pytest.mark.parametrize("for_good", [True, False])
def test_fake_daemon_engine_does_not_wait_for_a_sidecar_that_will_not_come(share, for_good):
    made = share("cuda:0", answer_s=0.5)
    made.start()
    made.sidecar_is_gone("the task raised", for_good=for_good)
    answer = ask([H200.uuid]).answer
    assert not answer.join
    assert ("the task raised" if for_good else "not ready after") in answer.reason


def test_fake_daemon_second_run_on_the_gpu_is_refused_and_leaves_nothing(share):
    made = share("cuda:0")
    with take_gpu(H200.uuid, "eeee5555"), pytest.raises(AlreadyRunningError, match="eeee5555"):
        made.start()
    assert made.daemon.find() is None
    assert not mps_folder(RUN).path.exists()


def test_a_gpu_that_is_not_there_or_not_possible_is_refused_before_anything_starts(share):
    with pytest.raises(PlacementError, match="no cuda:7"):
        share("cuda:7").start()
    with pytest.raises(PlacementError, match="MIG"):
        share("cuda:0", gpus=(replace(H200, mig=True),)).start()
    with pytest.raises(PlacementError, match="do not fit"):
        share("cuda:0", memory=200 * GIB).start()
    assert not mps_folder(RUN).path.exists()


@pytest.mark.parametrize("is_client", [False, True])
def test_fake_daemon_engine_is_proven_only_as_a_client(share, state, monkeypatch, caplog, is_client):
    caplog.set_level("INFO", "mps_trainer")
    made = share("cuda:0")
    made.start()
    made.sidecar_is_ready()
    session = ask([H200.uuid])
    session.tell("ready")
    wait_for(lambda: made.engines[0].state == "ready")
    if is_client:
        ps = f"PID ID SERVER DEVICE NAMESPACE COMMAND\n{os.getpid()} 1 466 GPU-0f3cc1cf 4026531836 python3\n"
        (state / "answers.json").write_text(json.dumps({"ps": ps}))
        monkeypatch.setenv("FAKE_MPS_ANSWERS", str(state / "answers.json"))
    made.prove_engines()
    assert f"(pid {os.getpid()}) is up" in caplog.text
    assert ("is up and proven to be an MPS client" in caplog.text) is is_client


def test_fake_daemon_engine_on_a_gpu_that_cannot_be_had_starts_alone_and_the_next_one_summons(share):
    made = share("cuda")
    made.start()
    with take_gpu(H200.uuid, "eeee5555"):
        assert "eeee5555" in ask([H200.uuid]).answer.reason
    made.sidecar_is_ready()
    assert ask([OTHER.uuid]).answer.join


def test_fake_daemon_engine_whose_gpu_is_full_leaves_it_to_others(share):
    made = share("cuda", gpus=(replace(H200, used=H200.total), OTHER))
    made.start()
    assert not ask([H200.uuid]).answer.join
    assert not made.is_placed
    take_gpu(H200.uuid, "somebody else").release()

"""The daemon, with a fake control binary that answers with recorded text. Processes, files and locks are real."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from mps_helpers import FAKE_CONTROL, recorded

from mps_trainer.errors import AlreadyRunningError, PlacementError
from mps_trainer.mps.control import MpsDaemon, parse_clients, parse_faults
from mps_trainer.mps.folder import MpsFolder, mps_folder
from mps_trainer.mps.lease import take_gpu
from mps_trainer.mps.sweep import sweep_daemons
from mps_trainer.run import try_hold

UUID = "GPU-0f3cc1cf-565d-9b0a-543c-d4b754f70410"
PS = (
    "PID      ID   SERVER   DEVICE               NAMESPACE    COMMAND                       ATTRIBUTES\n"
    "459      1    466      GPU-0f3cc1cf-565d    4026531836   python3                       N/A\n"
)


def answers(monkeypatch, state, **by_command):
    path = state / "answers.json"
    path.write_text(json.dumps(by_command))
    monkeypatch.setenv("FAKE_MPS_ANSWERS", str(path))


def test_fake_daemon_starts_sees_every_gpu_and_ends_with_its_folder(fake_daemon, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    started = fake_daemon.start()
    assert started.is_running
    assert fake_daemon.find() == started
    # With CUDA_VISIBLE_DEVICES the real one would renumber the GPUs under Ray's feet.
    assert json.loads(fake_daemon.log_tail("control"))["CUDA_VISIBLE_DEVICES"] is None
    assert fake_daemon.folder.pipe_dir.stat().st_mode & 0o777 == 0o700
    with pytest.raises(PlacementError, match=r"runs in .* already"):
        fake_daemon.start()
    assert fake_daemon.quit()
    assert not started.is_running
    assert fake_daemon.find() is None
    assert not fake_daemon.folder.path.exists()


def test_fake_daemon_two_runs_do_not_meet(state):
    daemons = [MpsDaemon(mps_folder(f"{i}abcdef0"), str(FAKE_CONTROL)) for i in range(2)]
    first, second = (daemon.start() for daemon in daemons)
    assert first != second
    assert daemons[0].quit()
    assert second.is_running
    assert daemons[1].quit()


def test_fake_daemon_names_its_servers_and_clients(fake_daemon, state, monkeypatch):
    answers(monkeypatch, state, ps=PS, get_server_list="466\n", **{"get_server_status 466": "ACTIVE\n"})
    fake_daemon.start()
    assert fake_daemon.servers() == [466]
    assert fake_daemon.server_status(466) == "ACTIVE"
    assert fake_daemon.is_client(459)
    assert not fake_daemon.is_client(466)


def test_fake_daemon_that_does_not_answer_is_an_error_within_the_limit(fake_daemon, monkeypatch):
    fake_daemon.start()
    monkeypatch.setenv("FAKE_MPS_HANG", "ps")
    before = time.monotonic()
    with pytest.raises(PlacementError, match="did not answer 'ps'"):
        fake_daemon.ask("ps", timeout_s=0.6)
    assert time.monotonic() - before < 60


def test_fake_daemon_is_asked_one_question_at_a_time(fake_daemon):
    fake_daemon.start()
    with try_hold(fake_daemon.folder.control_lock), pytest.raises(PlacementError, match="another question"):
        fake_daemon.ask("get_server_list", timeout_s=0.2)
    errors = []

    def ask():
        try:
            fake_daemon.ask("get_server_list", timeout_s=90)
        except PlacementError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_fake_daemon_that_cannot_start_says_what_it_said(fake_daemon, monkeypatch):
    monkeypatch.setenv("FAKE_MPS_BROKEN", "1")
    with pytest.raises(PlacementError, match="permission denied"):
        fake_daemon.start()


def test_without_a_control_binary_the_message_names_the_package(state):
    with pytest.raises(PlacementError, match="not on the PATH") as caught:
        MpsDaemon(mps_folder("a1b2c3d4"), "no-such-binary").start()
    assert "nvidia-compute-utils" in caught.value.todo


def test_a_path_too_long_for_a_socket_is_refused_before_anything_starts(tmp_path):
    folder = MpsFolder(tmp_path / ("x" * 120))
    with pytest.raises(PlacementError, match="too long"):
        folder.make()
    assert not folder.path.exists()


def test_a_pid_file_that_names_somebody_else_is_not_our_daemon(fake_daemon):
    fake_daemon.folder.make()
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (fake_daemon.folder.pipe_dir / "nvidia-cuda-mps-control.pid").write_text(str(sleeper.pid))
        assert fake_daemon.find() is None
        assert fake_daemon.quit()
        assert sleeper.poll() is None
    finally:
        sleeper.communicate(b"\n")


@pytest.mark.parametrize("text", ["", "\n", "No servers\n", PS.splitlines()[0]])
def test_no_clients_in_what_lists_none(text):
    assert parse_clients(text) == []


def test_recorded_server_log_names_who_caused_a_fault_and_who_fell_with_it():
    (fault,) = parse_faults(recorded("server_580_fault.log"))
    assert fault.pid == 530
    assert fault.torn_down == (530, 535)
    assert fault.when.startswith("2026-11-30 15:26:47")


def test_a_gpu_is_leased_to_one_run_and_the_holder_is_named(state):
    with take_gpu(UUID, "aaaa1111"):
        with pytest.raises(AlreadyRunningError, match=f"aaaa1111, pid {os.getpid()}"):
            take_gpu(UUID, "bbbb2222")
        take_gpu(UUID.replace("0f3c", "ffff"), "bbbb2222").release()
    take_gpu(UUID, "bbbb2222").release()


def test_fake_daemons_of_dead_runs_are_swept_and_busy_or_living_ones_are_not(state, monkeypatch):
    binary = str(FAKE_CONTROL)
    dead, busy, living = (MpsDaemon(mps_folder(f"{i}abcdef0"), binary) for i in range(3))
    for daemon in (dead, living):
        daemon.start()
    try:
        assert sweep_daemons(lambda run_id: run_id == "2abcdef0", binary) == (["0abcdef0"], [])
        answers(monkeypatch, state, ps=PS)
        busy.start()
        assert sweep_daemons(lambda run_id: run_id == "2abcdef0", binary) == ([], ["1abcdef0"])
        assert busy.find() is not None
        assert living.find() is not None
    finally:
        for daemon in (busy, living):
            assert daemon.quit()


def test_recorded_client_that_is_just_ending_has_no_command():
    heading = "PID       ID    SERVER    DEVICE             NAMESPACE      COMMAND"
    text = f"{heading}\n459       1     466       GPU-0f3cc1cf     4026531836\n"
    assert [(client.pid, client.server_pid, client.command) for client in parse_clients(text)] == [(459, 466, "")]


def test_a_row_of_ps_without_a_server_is_no_client_and_hides_no_other():
    row = PS.splitlines()[1]
    text = "\n".join([PS.splitlines()[0], row.replace("466", "-  "), row.replace("459", "\u00b2  "), row])
    assert [client.pid for client in parse_clients(text)] == [459]


def test_fake_daemon_whose_answer_is_no_text_is_understood(fake_daemon, state):
    fake_daemon.start()
    binary = state / "nvidia-cuda-mps-control"
    binary.write_bytes(b"#!/bin/sh\nprintf '" + PS.replace("\n", "\\n").replace("python3", "k\\303").encode() + b"'\n")
    binary.chmod(0o755)
    [client] = MpsDaemon(fake_daemon.folder, str(binary)).clients()
    assert (client.pid, client.command) == (459, "k\ufffd")


def test_fake_daemon_whose_binary_or_folder_has_gone_is_an_error_of_ours(fake_daemon):
    fake_daemon.start()
    with pytest.raises(PlacementError, match=r"cannot ask .*No such file"):
        MpsDaemon(fake_daemon.folder, "/nowhere/nvidia-cuda-mps-control").ask("ps")
    shutil.rmtree(fake_daemon.folder.path)
    with pytest.raises(PlacementError, match=r"cannot ask .*No such file"):
        fake_daemon.ask("ps")
    assert fake_daemon.faults() == []
    assert fake_daemon.log_tail("control") == ""


def test_fake_daemon_that_hangs_at_its_start_is_an_error_of_ours(state):
    binary = state / "nvidia-cuda-mps-control"
    binary.write_text("#!/bin/sh\nexec sleep 60\n")
    binary.chmod(0o755)
    with pytest.raises(PlacementError, match=r"did not start \(.*timed out"):
        MpsDaemon(mps_folder("a1b2c3d4"), str(binary)).start(0.3)


def test_a_fault_stays_known_when_its_log_is_cleaned_away(fake_daemon):
    fake_daemon.folder.make()
    log = fake_daemon.folder.log_dir / "server.log"
    log.write_text(recorded("server_580_fault.log"))
    [fault] = fake_daemon.faults()
    log.unlink()
    assert fake_daemon.faults() == [fault]


@pytest.mark.parametrize("cleaned", ["pipe/nvidia-cuda-mps-control.pid", "pipe", "."])
def test_fake_daemon_ends_although_its_files_were_cleaned_away(fake_daemon, cleaned):
    started = fake_daemon.start()
    path = fake_daemon.folder.path / cleaned
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert fake_daemon.find() == started
    assert fake_daemon.quit()
    assert not started.is_running
    assert not fake_daemon.folder.path.exists()


def test_a_daemon_without_files_that_does_not_listen_to_a_signal_has_not_ended(fake_daemon):
    started = fake_daemon.start()
    (fake_daemon.folder.pipe_dir / "nvidia-cuda-mps-control.pid").unlink()
    assert started.send(signal.SIGSTOP)
    assert not fake_daemon.quit(0.3)
    assert fake_daemon.folder.path.exists()
    started.send(signal.SIGCONT)
    assert fake_daemon.quit()

"""A whole run on a shared GPU, all of ours real but the training: supervisor, files, sockets, plugin.

The GPU is recorded (fake_nvml), the control binary and the engine are stand-ins.
"""

import json
import os
import re
import time

import pytest
from mps_helpers import HERE, UUIDS, join, nothing_is_left, supervisor_log, wait_for

from mps_trainer.errors import MpsTrainerError, RunError
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.lease import take_gpu
from mps_trainer.mps.summons import EngineRequest, EngineSession
from mps_trainer.run import State
from mps_trainer.run.process import ProcessIdentity


def test_fake_engine_joins_a_run_on_a_recorded_gpu_and_nothing_is_left(start):
    run = start("cuda:0", 1)
    daemon = MpsDaemon(mps_folder(run.record.run_id)).find()
    assert daemon.is_running
    with pytest.raises(MpsTrainerError, match=run.record.run_id):
        take_gpu(UUIDS[0], "second run")
    found = join(run, UUIDS[0])
    assert found["env"] == {"CUDA_MPS_PIPE_DIRECTORY": str(mps_folder(run.record.run_id).pipe_dir)}
    assert 0.9 < found["used"] < 0.95
    wait_for(lambda: "no process of it is a client" in supervisor_log(run) or "none of its" in supervisor_log(run))
    run.stop()
    assert not daemon.is_running
    nothing_is_left(run.record.run_id)


def test_fake_engine_summons_the_sidecar_to_its_recorded_gpu(start):
    run = start("auto", 2)
    assert run.status().state is State.WAITING
    assert "told to go on" not in (run.run_dir / "fake.log").read_text()
    assert not (mps_folder(run.record.run_id).path / "placement.json").exists()
    found = join(run, UUIDS[1])
    assert found["env"]
    assert "told to go on" in (run.run_dir / "fake.log").read_text()
    assert re.search(r"summoned by pid \d+: READY after \d+\.\d s", supervisor_log(run))
    assert run.status().pid == run.sidecar_pid
    placement = json.loads((mps_folder(run.record.run_id).path / "placement.json").read_text())
    assert placement["gpu_uuid"] == UUIDS[1]
    assert join(run, UUIDS[0])["used"] == 0.95
    run.stop()
    nothing_is_left(run.record.run_id)


def test_run_that_waits_for_an_engine_can_be_ended(start):
    run = start("auto", 2)
    begin = time.monotonic()
    run.stop()
    assert time.monotonic() - begin < 60
    assert run.status().state is State.STOPPED
    nothing_is_left(run.record.run_id)


def test_task_that_cannot_be_made_is_told_at_up_before_there_is_an_engine(start):
    with pytest.raises(RunError, match="the task does not import") as caught:
        start("auto", 2, "task-error")
    assert caught.value.todo == "install it"
    assert list(mps_folder("x").path.parent.glob("*")) == []


def test_fake_engine_starts_alone_when_the_task_has_failed_and_the_daemon_is_gone_with_the_run(start):
    run = start("auto", 2, "task-error-when-placed")
    found = join(run, UUIDS[0])
    assert found["used"] == 0.95
    assert found["env"] == {}
    wait_for(lambda: not ProcessIdentity.of(run.supervisor.pid) or run.supervisor.poll() is not None)
    nothing_is_left(run.record.run_id)


def test_run_that_cannot_have_the_gpu_says_who_has_it_and_leaves_nothing(start):
    with take_gpu(UUIDS[0], "other run"), pytest.raises(MpsTrainerError, match="other run"):
        start("cuda:0", 1)
    assert list(mps_folder("x").path.parent.glob("*")) == []


def test_task_of_ones_own_goes_on_probation_on_the_recorded_gpu_of_the_run(start, monkeypatch, tmp_path):
    support = HERE.parent / "support"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(support), os.environ["PYTHONPATH"]]))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/somebody-elses")
    with pytest.raises(MpsTrainerError, match=r"probation is to be on cuda:0, but torch .* sees no CUDA device"):
        start("cuda:0", 1, more='task: "tried_tasks:Good"')
    run_dir = tmp_path / "ckpt" / "lab" / "run.mps-trainer" / "latest"
    assert json.loads((run_dir / "probation.json").read_text())["where"] == "on cuda:0"
    assert not (run_dir / "fake.log").exists()
    nothing_is_left(run_dir.resolve().name)


def test_run_whose_recorded_gpus_are_full_tries_on_the_cpu_which_is_no_measure_of_time(start, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent / "support"), os.environ["PYTHONPATH"]]))
    run = start("auto", 2, more='task: "tried_tasks:Hangs", probation_timeout: 8s, memory: 139GiB')
    assert run.status().state is State.WAITING
    assert "on the CPU, since no idle GPU has 140.0 GiB free" in supervisor_log(run)
    assert "probation was not over after 8 s; the CPU is no measure" in supervisor_log(run)
    run.stop()
    nothing_is_left(run.record.run_id)


def test_run_whose_recorded_gpu_is_not_known_yet_takes_an_idle_one_for_probation(start, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent / "support"), os.environ["PYTHONPATH"]]))
    with pytest.raises(MpsTrainerError, match="sees no CUDA device"):
        start("auto", 2, more='task: "tried_tasks:Good"')
    run_dir = tmp_path / "ckpt" / "lab" / "run.mps-trainer" / "latest"
    assert "on cuda:1, which is idle; no engine has named a GPU yet" in (run_dir / "supervisor.log").read_text()
    nothing_is_left(run_dir.resolve().name)


def test_sidecar_is_told_to_stay_while_a_fake_engine_starts_on_the_recorded_gpu(start):
    run = start("cuda:0", 1)
    folder = mps_folder(run.record.run_id)
    assert not folder.hold_file.exists()
    session = EngineSession(folder.summons_socket, EngineRequest((UUIDS[0],), "rollout"), 90.0)
    assert session.answer.join
    assert folder.hold_file.exists()
    begin = time.monotonic()
    wait_for(lambda: time.monotonic() - begin > 1.2 and folder.hold_file.exists())
    session.tell("ready")
    wait_for(lambda: not folder.hold_file.exists())
    session.close()
    run.stop()
    nothing_is_left(run.record.run_id)

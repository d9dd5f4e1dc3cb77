"""A run with `device: auto` on a shared GPU from `up` to the first engine: the sidecar waits warm.

The GPU is recorded (fake_nvml), the control binary and the engine are stand-ins; so is the sidecar, except where a
test's name says real.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mps_helpers import HERE, UUIDS, join, nothing_is_left, supervisor_log, wait_for

from mps_trainer.errors import RunError
from mps_trainer.launcher.runs import end_runs, list_runs
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.run import State, is_held
from mps_trainer.run.doing import DoingFile
from mps_trainer.run.process import ProcessIdentity


def kill_the_waiting(run, restarts):
    """SIGKILL the sidecar that waits; the one that is there then waits after so many restarts."""
    wait_for(lambda: (run.status().state, run.status().restarts) == (State.WAITING, restarts - 1))
    life = ProcessIdentity.of(run.status().pid)
    life.send(signal.SIGKILL)
    wait_for(lambda: run.status().restarts == restarts)


def lives(run):
    return [line.split()[0] for line in (run.run_dir / "fake.log").read_text().splitlines()]


def test_fake_sidecar_that_dies_while_it_waits_is_started_again_and_can_be_summoned(start):
    run = start("auto", 2)
    kill_the_waiting(run, 1)
    wait_for(lambda: run.status().state is State.WAITING)
    assert run.status().pid != run.sidecar_pid
    assert join(run, UUIDS[1])["env"]
    assert GpuPlacement.load(mps_folder(run.record.run_id)).gpu_uuid == UUIDS[1]
    assert lives(run) == ["start", "start", "told"]
    run.stop()
    nothing_is_left(run.record.run_id)


def test_fake_sidecar_that_waits_for_an_engine_is_not_taken_for_hung(start):
    run = start("auto", 2, more="hang_timeout: 1s")
    # Such as one that a former life has left: nobody beats while it waits.
    DoingFile(run.run_dir, 1).close()
    with pytest.raises(subprocess.TimeoutExpired):
        run.supervisor.wait(4)
    assert (run.status().state, run.status().pid, run.status().restarts) == (State.WAITING, run.sidecar_pid, 0)
    run.stop()
    nothing_is_left(run.record.run_id)


def test_fake_engine_that_comes_while_the_dead_sidecar_is_replaced_waits_for_a_cold_one(start):
    run = start("auto", 2)
    ProcessIdentity.of(run.sidecar_pid).send(signal.SIGKILL)
    assert join(run, UUIDS[0])["env"]
    # By then it is known where it goes, unless the engine was slower than the restart.
    assert lives(run)[:2] == ["start", "start"]
    assert run.status().state is State.READY
    run.stop()
    nothing_is_left(run.record.run_id)


def test_fake_sidecar_that_keeps_dying_while_it_waits_is_given_up_and_engines_start_alone(start):
    run = start("auto", 2)
    kill_the_waiting(run, 1)
    kill_the_waiting(run, 2)
    wait_for(lambda: run.status().state is State.WAITING)
    ProcessIdentity.of(run.status().pid).send(signal.SIGKILL)
    wait_for(lambda: run.supervisor.poll() is not None)
    assert run.status().state is State.FAILED
    assert "max_restarts is 2" in run.status().error
    assert join(run, UUIDS[0])["env"] == {}
    nothing_is_left(run.record.run_id)


def test_fake_sidecar_that_dies_in_its_second_start_is_started_a_third_time(start):
    run = start("auto", 2, "crash-at-the-second-start")
    ProcessIdentity.of(run.sidecar_pid).send(signal.SIGKILL)
    wait_for(lambda: (run.status().state, run.status().restarts) == (State.WAITING, 2))
    run.stop()
    assert run.status().state is State.STOPPED


def test_end_between_two_waiting_lives_starts_no_third_one(start):
    run = start("auto", 2)
    kill_the_waiting(run, 1)
    run.stop()
    assert run.supervisor.returncode == 0
    assert run.status().state is State.STOPPED
    assert lives(run)[0] == "start"
    assert "told" not in lives(run)
    nothing_is_left(run.record.run_id)


def test_killed_supervisor_leaves_no_waiting_sidecar(start):
    run = start("auto", 2)
    run.supervisor.kill()
    run.supervisor.wait(5)
    wait_for(lambda: ProcessIdentity.of(run.sidecar_pid) is None)
    assert lives(run) == ["start", "ended"]
    end_runs(list_runs())
    # The daemon has nobody to end it; the next `up` or `down` sweeps it.
    assert not is_held(run.paths.supervisor_lock)


def test_fake_engine_that_is_waiting_when_the_run_ends_starts_alone_at_once(start):
    run = start("auto", 2, "silent-when-placed")
    found = []
    engine = threading.Thread(target=lambda: found.append(join(run, UUIDS[0])))
    engine.start()
    wait_for(lambda: "told" in lives(run))
    run.stop()
    engine.join(10)
    assert found[0]["env"] == {}
    nothing_is_left(run.record.run_id)


def test_real_sidecar_waits_without_a_gpu_shows_it_and_ends_at_once(start):
    run = start("auto", 2, None)
    assert run.status().state is State.WAITING
    said = subprocess.run(
        [sys.executable, "-m", "mps_trainer", "status"],
        env={**os.environ, "COLUMNS": "300"}, capture_output=True, text=True, check=True, timeout=30,
    ).stdout  # fmt: skip
    assert run.record.run_id in said
    assert "waiting for the first rollout engine" in said
    assert not (mps_folder(run.record.run_id).path / "placement.json").exists()
    assert "libcuda.so" not in Path(f"/proc/{run.sidecar_pid}/maps").read_text()
    run.stop()
    assert run.status().state is State.STOPPED
    nothing_is_left(run.record.run_id)


def test_real_sidecar_goes_on_when_summoned_and_says_that_there_is_no_cuda(start):
    run = start("auto", 2, None)
    assert join(run, UUIDS[1])["env"] == {}
    wait_for(lambda: run.supervisor.poll() is not None)
    assert run.status().state is State.FAILED
    assert "sees no CUDA device" in run.status().error
    assert "the engine starts alone" in supervisor_log(run)
    nothing_is_left(run.record.run_id)


def test_real_sidecar_whose_task_cannot_be_made_is_told_at_up(start):
    with pytest.raises(RunError, match="has no argument 'colour'"):
        start("auto", 2, None, more="task_args: {colour: red}")
    assert list_runs() == []
    assert list(mps_folder("x").path.parent.glob("*")) == []


def test_real_sidecar_with_a_mocked_gpu_is_ready_soon_after_the_summons(start):
    run = start("auto", 2, [sys.executable, str(HERE / "sidecar_on_cpu.py")])
    # What takes long is done before: the imports. How long the rest takes depends on who else is at work here.
    assert "libtorch_cpu" in Path(f"/proc/{run.sidecar_pid}/maps").read_text()
    assert join(run, UUIDS[1])["env"]
    assert run.status().state is State.READY
    found = json.loads((run.run_dir / "startup.json").read_text())
    assert 0 < found["summons_to_ready_s"] < found["ready_s"]
    assert next(iter(found["phases_s"])) == "imports"
    assert "summoned by pid" in supervisor_log(run)
    run.stop()
    assert run.status().state is State.STOPPED
    nothing_is_left(run.record.run_id)


def test_gpu_summons_script_with_a_mocked_gpu(start, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "mocked_gpu"), str(HERE / "fake_nvml"), *sys.path]))
    monkeypatch.setenv("FAKE_NVML_GPUS", "1")
    script = HERE.parents[1] / "scripts" / "gpu_summons.py"
    done = subprocess.run(
        [sys.executable, script, "--repeats", "1", "--out", tmp_path / "out.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["as wanted"]
    assert found["summary"]["left"] == []
    assert [one["arm"] for one in found["rounds"]] == ["summons", "cuda:0"]
    assert found["summary"]["summons to READY, s"]["n"] == 1


def test_a_run_whose_mps_folder_was_cleaned_away_ends_in_order_with_its_daemon(start):
    run = start("cuda:0", 1)
    daemon = MpsDaemon(mps_folder(run.record.run_id)).find()
    shutil.rmtree(mps_folder(run.record.run_id).path)
    os.kill(run.supervisor.pid, signal.SIGTERM)
    assert run.supervisor.wait(20) == 0
    assert run.status().state is State.STOPPED
    assert daemon.wait(5)

"""Without a GPU: a fake control binary, a state folder of the test's own with a short path."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from mps_helpers import CONFIG, FAKE_CONTROL, FAKE_SIDECAR, GIB, HERE, UUIDS, wait_for

from mps_trainer.launcher.gpu import Gpu, GpuReading
from mps_trainer.launcher.machine import Machine
from mps_trainer.launcher.process_titles import command_line
from mps_trainer.launcher.runs import end_runs, list_runs
from mps_trainer.launcher.up import prepare, start_run
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import mps_folder


@pytest.fixture
def state(monkeypatch):
    # pytest's tmp_path is longer than a Unix socket's path may be.
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as folder:
        monkeypatch.setenv("MPS_TRAINER_STATE_DIR", f"{folder}/s")
        yield Path(folder)


@pytest.fixture
def fake_daemon(state):
    daemon = MpsDaemon(mps_folder(f"{os.getpid():08x}"), str(FAKE_CONTROL))
    yield daemon
    if daemon.find() is not None:
        daemon.quit()


@pytest.fixture
def planned(state, tmp_path, monkeypatch):
    """A run that can be started: device, number of recorded GPUs, and what of the settings differs."""
    (state / "bin").mkdir()
    (state / "bin" / "nvidia-cuda-mps-control").symlink_to(FAKE_CONTROL)
    monkeypatch.setenv("PATH", f"{state / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "fake_nvml"), *sys.path]))

    def plan(device, num_gpus, *, join="plugin", mps="on", name="run", more=""):
        monkeypatch.setenv("FAKE_NVML_GPUS", str(num_gpus))
        gpus = tuple(Gpu(i, UUIDS[i], "NVIDIA H200", 150754820096, 150109880320) for i in range(num_gpus))
        machine = Machine(64 * GIB, 64 * GIB, 64 * GIB, 64 * GIB, GpuReading(gpus, "580.159.04"))
        path = tmp_path / f"{name}.yaml"
        more = f", {more}" if more else ""
        args = f'{{device: "{device}", mps: {mps}, join: {join}, ready_timeout: 120s, max_restarts: 2{more}}}'
        path.write_text(CONFIG.format(root=tmp_path / "ckpt", args=args, name=name))
        return prepare(path, machine)

    return plan


@pytest.fixture
def start(planned):
    """Start one; the runs that a test leaves are ended."""

    def begin(device, num_gpus, behaviour="serve", **options):
        # None is the real sidecar, a list another command.
        command = [sys.executable, str(FAKE_SIDECAR), behaviour] if isinstance(behaviour, str) else behaviour or []
        return start_run(planned(device, num_gpus, **options), sidecar_command=command)

    yield begin
    end_runs(list_runs(), timeout_s=90)


@pytest.fixture
def process():
    started = []

    def start(title, **env):
        child = subprocess.Popen([title, "60"], executable="/bin/sleep", env=env)
        started.append(child)
        # Popen comes back at the exec, a moment before the kernel has set the new command line.
        wait_for(lambda: command_line(child.pid) == f"{title} 60")
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()

"""A whole run on a recorded GPU (fake_nvml) with a stand-in for the control binary: how to start one and look at it."""

import os
import sys

from mps_helpers import FAKE_CONTROL, HERE
from test_vllm_plugin import start_engine

from mps_trainer.launcher.gpu import Gpu, GpuReading
from mps_trainer.launcher.machine import Machine
from mps_trainer.launcher.up import prepare, start_run
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.lease import take_gpu

FAKE_SIDECAR = HERE.parent / "launcher" / "fake_sidecar.py"
GIB = 2**30
UUIDS = ("GPU-0f3cc1cf-565d-9b0a-543c-d4b754f70410", "GPU-11111111-565d-9b0a-543c-d4b754f70410")
CONFIG = """\
mode: explore
project: lab
name: run
checkpoint_root_dir: {root}
model: {{model_path: /none}}
buffer: {{batch_size: 4, total_steps: 2}}
data_processor:
  experience_pipeline:
    operators:
      - name: mps_trainer.operator.AuxTrainer
        args: {{device: "{device}", mps: on, ready_timeout: 20s, max_restarts: 2{more}}}
"""


def starter(state, tmp_path, monkeypatch):
    """`start(device, num_gpus, behaviour)`; None is the real sidecar, a list another command."""
    (state / "bin").mkdir()
    (state / "bin" / "nvidia-cuda-mps-control").symlink_to(FAKE_CONTROL)
    monkeypatch.setenv("PATH", f"{state / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "fake_nvml"), *sys.path]))

    def start(device, num_gpus, behaviour="serve", more="", **kwargs):
        monkeypatch.setenv("FAKE_NVML_GPUS", str(num_gpus))
        gpus = tuple(Gpu(i, UUIDS[i], "NVIDIA H200", 150754820096, 150109880320) for i in range(num_gpus))
        machine = Machine(64 * GIB, 64 * GIB, 64 * GIB, 64 * GIB, GpuReading(gpus, "580.159.04"))
        path = tmp_path / "run.yaml"
        path.write_text(CONFIG.format(root=tmp_path / "ckpt", device=device, more=f", {more}" if more else ""))
        command = [sys.executable, str(FAKE_SIDECAR), behaviour] if isinstance(behaviour, str) else behaviour or []
        return start_run(prepare(path, machine), sidecar_command=command, **kwargs)

    return start


def join(run, gpu):
    """What a stand-in engine on this GPU found out and did."""
    return start_engine(0.95, MPS_TRAINER_RUN=run.record.run_id, CUDA_VISIBLE_DEVICES=gpu)[0]


def supervisor_log(run):
    return (run.run_dir / "supervisor.log").read_text()


def nothing_is_left(run_id):
    assert not mps_folder(run_id).path.exists()
    assert MpsDaemon(mps_folder(run_id)).find() is None
    for uuid in UUIDS:
        take_gpu(uuid, "somebody else").release()

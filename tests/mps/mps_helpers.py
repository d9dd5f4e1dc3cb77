"""What the tests of MPS share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.lease import take_gpu

HERE = Path(__file__).parent
FAKE_CONTROL = HERE / "fake_control"


def recorded(name: str) -> str:
    """Text that the real thing once said."""
    return (HERE / "recorded" / name).read_text()


def wait_for(condition: Callable[[], object], timeout_s: float = 90) -> None:
    """Poll until `condition` holds; fails after the limit."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


FAKE_SIDECAR = HERE.parent / "launcher" / "fake_sidecar.py"
GIB = 2**30
UUIDS = ("GPU-0f3cc1cf-565d-9b0a-543c-d4b754f70410", "GPU-11111111-565d-9b0a-543c-d4b754f70410")
CONFIG = """\
mode: explore
project: lab
name: {name}
checkpoint_root_dir: {root}
model: {{model_path: /none}}
explorer:
  rollout_model:
    tensor_parallel_size: 1
    gpu_memory_utilization: 0.95   # most of it
buffer: {{batch_size: 4, total_steps: 2}}
data_processor:
  experience_pipeline:
    operators:
      - {{name: mps_trainer.operator.AuxTrainer, args: {args}}}
"""
VERL, VLLM = "ray::WorkerDict.actor_update_actor", "VLLM::EngineCore"
ENGINE = """
import json, os, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
wished = float(sys.argv[1])
args = EngineArgs(wished)
try:
    engine = AsyncLLM.from_engine_args(args)
    again = args.create_engine_config()
    used = engine.vllm_config["gpu_memory_utilization"]
except ValueError as error:
    used, again = str(error), None
child = os.popen(f"{sys.executable} -c 'from vllm.engine.arg_utils import EngineArgs as E; "
                 f"print(E(0.9).create_engine_config())'").read()
names = [n for n in os.environ if n.startswith("CUDA_MPS")]
print(json.dumps({"used": used, "again": again, "env": {n: os.environ[n] for n in names}, "child": child,
                  "ray": "ray" in sys.modules, "torch": "torch" in sys.modules}))
"""


def start_engine(wished=0.9, **env):
    """What a fake engine saw, and what it said."""
    path = os.pathsep.join([str(HERE / "fake_vllm"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(wished)],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": "GPU-a",
            "MPS_TRAINER_JOIN_TIMEOUT": "90",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def join(run, gpu, **env):
    """A fake engine of the run that wishes 0.95; what it saw."""
    return start_engine(0.95, MPS_TRAINER_RUN=run.record.run_id, CUDA_VISIBLE_DEVICES=gpu, **env)[0]


def supervisor_log(run):
    """All that the supervisor has said."""
    return (run.run_dir / "supervisor.log").read_text()


def nothing_is_left(run_id):
    """No folder, no daemon, no lease."""
    assert not mps_folder(run_id).path.exists()
    assert MpsDaemon(mps_folder(run_id)).find() is None
    for uuid in UUIDS:
        take_gpu(uuid, "somebody else").release()

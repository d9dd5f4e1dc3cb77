"""`scripts/gpu_stranger.py` rehearsed: recorded GPU, fake daemon and stranger, a real sidecar with its GPU mocked."""

import json
import os
import subprocess
import sys

import pytest
from mps_helpers import FAKE_CONTROL, HERE, UUIDS

SCRIPTS = HERE.parents[1] / "scripts"
REHEARSAL = """
import os, sys
from pathlib import Path
import gpu_stranger as script
begin, work = script.prepare_environment, Path(sys.argv[1])
def prepare(work):
    begin(work)
    # The task would ask CUDA.
    del os.environ["GPU_TASK_MEMORY"]
script.prepare_environment = prepare
script.STRANGER = (sys.executable, sys.argv[3], str(work))
script.drill(work, "1GiB", work / "out.json", (sys.executable, sys.argv[2]))
"""
# Writes itself into NVML's list, beside the sidecar that is READY now, and into the list of nobody's clients.
STRANGER = """
import json, os, sys
from pathlib import Path
def there(*pids):
    path = Path(os.environ["FAKE_NVML_PROCESSES"])
    path.with_suffix(".new").write_text(json.dumps({"%s": pids}))
    path.with_suffix(".new").replace(path)
print("warm", flush=True)
sys.stdin.readline()
states = [json.loads(path.read_text()) for path in Path(sys.argv[1]).glob("checkpoints/**/status.json")]
(sidecar,) = [state["pid"] for state in states if state["state"] == "ready"]
there(sidecar, os.getpid())
print("computes", flush=True)
sys.stdin.read()
there(sidecar)
"""


@pytest.mark.slow
def test_the_drill_with_a_fake_stranger_on_a_recorded_gpu_finds_what_it_wants(state):
    (state / "bin").mkdir()
    (state / "bin" / "nvidia-cuda-mps-control").symlink_to(FAKE_CONTROL)
    (state / "stranger.py").write_text(STRANGER % UUIDS[0])
    (state / "answers.json").write_text("{}")
    env = {
        **os.environ,
        "PATH": f"{state / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "fake_nvml", SCRIPTS, HERE.parents[1]])),
        "FAKE_NVML_GPUS": "1",
        "FAKE_NVML_PROCESSES": str(state / "processes.json"),
        "FAKE_MPS_ANSWERS": str(state / "answers.json"),
    }
    command = [sys.executable, "-c", REHEARSAL, state, HERE / "sidecar_on_cpu.py", state / "stranger.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    # Not what is left on the GPU: the fake stranger has said of the last sidecar that it is there.
    found = json.loads((state / "out.json").read_text())
    assert found["mps: auto"]["right"], done.stdout + done.stderr
    assert found["mps: on"]["right"], done.stdout + done.stderr


def test_the_drill_says_what_it_needs():
    path = os.pathsep.join(map(str, [HERE / "fake_nvml", HERE.parents[1], *sys.path]))
    env = {**os.environ, "PYTHONPATH": path, "FAKE_NVML_GPUS": "0"}
    command = [sys.executable, SCRIPTS / "gpu_stranger.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 2
    assert "needs a GPU, found none" in done.stdout

"""`mps-trainer check-task` measures on a GPU where there is one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA driver here")]


def test_memory_step_and_kernel_are_those_of_the_gpu():
    data = ROOT / "examples/port_your_operator/experiences.jsonl"
    path = os.pathsep.join([str(ROOT), *sys.path])
    answer = subprocess.run(
        [sys.executable, "-m", "mps_trainer", "check-task", "after:OutlierRewardFilter", "--data", str(data)],
        cwd=data.parent,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "CUDA_MPS_PIPE_DIRECTORY": "/nowhere",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "after:OutlierRewardFilter on cuda:0, outside MPS" in answer.stdout
    [kernel] = re.findall(r"kernel +the longest takes ([\d.]+) ms", answer.stdout)
    assert 0 < float(kernel) < 5
    assert "reserved by PyTorch on the GPU" in answer.stdout
    assert "memory: 0.25GiB\n" in answer.stdout

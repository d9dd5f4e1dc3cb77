"""The GPU scripts as tests, short. They need the MPS control binary; each checks what it wants by itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="no MPS control binary here"),
]


@pytest.mark.parametrize(
    "command",
    [
        ["gpu_numerics.py", "--repeats", "1", "--shares", "100", "50", "25", "10", "20", "40", "70"],
        ["gpu_limit.py"],
        ["gpu_summons.py", "--repeats", "1"],
        ["gpu_ring_copy.py", "--repeats", "5"],
        ["gpu_intake.py"],
        ["gpu_poison.py"],
        ["gpu_probation.py"],
        ["gpu_stranger.py"],
        ["gpu_step_shapes.py", "--budget-s", "120", "--shapes", "eager,graph"],
        ["gpu_fault_drill.py", "--trials", "2", "--naive-trials", "4", "--budget-s", "150"],
    ],
    ids=lambda command: command[0],
)
def test_script_finds_what_it_wants(command, tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / command[0]), *command[1:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

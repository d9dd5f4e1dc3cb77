"""The command as a process, in a state folder of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mps_trainer.run import STATE_DIR_VARIABLE

Command = Callable[..., subprocess.CompletedProcess[str]]

CONFIG = """\
mode: explore
project: lab
name: run
checkpoint_root_dir: {root}
buffer: {{batch_size: 4, total_steps: 2}}
data_processor:
  experience_pipeline:
    operators:
      - name: mps_trainer.operator.AuxTrainer
        args:
          device: cpu
          ring_slots: 2
          ring_slot: 1MiB
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "trinity.yaml"
    path.write_text(CONFIG.format(root=tmp_path / "ckpt"))
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, STATE_DIR_VARIABLE: str(tmp_path / "state"), "COLUMNS": "100", "NO_COLOR": "1"}


@pytest.fixture
def mps_trainer(environment: dict[str, str], tmp_path: Path) -> Command:
    """Run `mps-trainer ARGS...` to its end."""

    def call(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mps_trainer", *map(str, args)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return call

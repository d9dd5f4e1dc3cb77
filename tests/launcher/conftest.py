"""Names, folders and small configs of a test's own; nothing of it is left behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mps_trainer.launcher.process import ProcessIdentity
from mps_trainer.launcher.runs import end_runs, list_runs
from mps_trainer.run import STATE_DIR_VARIABLE

FAKE_SIDECAR = Path(__file__).with_name("fake_sidecar.py")

CONFIG = """\
# how we explore
mode: explore
project: lab
name: {name}
checkpoint_root_dir: {root}  # scratch disk
model: {{model_path: "${{oc.env:HOME}}/model", max_model_len: 512}}
buffer:
  batch_size: 4
  total_steps: 2
data_processor:
  experience_pipeline:
    operators:
      # ours comes first
      - name: mps_trainer.operator.AuxTrainer
        args:
          device: cpu   # no GPU on my laptop
          ring_slots: 2
          ring_slot: 1MiB
          ready_timeout: 20s
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder of the test's own; runs that a test left are ended, and a test that leaves files fails."""
    folder = tmp_path / "state"
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(folder))
    yield folder
    end_runs(list_runs(), timeout_s=20)
    left = sorted(path.name for path in (folder / "runs").glob("*"))
    assert not left, f"left in the state folder: {left}"


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Write a Trinity YAML: `write_config(("old", "new"), ..., name=...)`, each pair replaced in the text above."""

    def write(*changes: tuple[str, str], name: str = "run") -> Path:
        text = CONFIG.format(name=name, root=tmp_path / "ckpt")
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def fake() -> Callable[[str], list[str]]:
    """The command of a stand-in sidecar with a behaviour; see fake_sidecar.py."""
    return lambda behaviour: [sys.executable, str(FAKE_SIDECAR), behaviour]


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 15.0) -> None:
    """Poll until `condition` holds; fails with `what` after the limit."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process with this PID runs and is no zombie."""
    return ProcessIdentity.of(pid) is not None


def kill(pid: int, number: int) -> None:
    """Signal a process that the test started."""
    os.kill(pid, number)

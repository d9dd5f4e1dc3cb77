"""What the tests of the launcher share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from mps_trainer.run.process import ProcessIdentity
from mps_trainer.transport import RingSettings, layout, weights_layout
from mps_trainer.transport.segment import new_header

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
          ready_timeout: 120s
"""


def segment_content(run_id: str) -> bytes:
    """A whole small segment as an operator of the run makes it."""
    header = new_header(run_id, RingSettings(2, 4096), "drop_oldest", b"{}", bytes(32))
    content = bytearray(header.segment_bytes)
    content[: layout.STATIC_BYTES] = header.pack()
    content[layout.SCHEMA : layout.SCHEMA + 2] = b"{}"
    return bytes(content)


def weights_content(run_id: str) -> bytes:
    """A whole small snapshot of weights as a sidecar of the run makes it."""
    entries = (weights_layout.WeightsEntry("w", "float32", (2,)),)
    header = weights_layout.WeightsHeader(run_id, 1, os.getuid(), os.getpid(), 0, 0, entries)
    content = bytearray(header.file_bytes)
    content[: weights_layout.STATIC_BYTES] = header.pack()
    content[weights_layout.MANIFEST : weights_layout.MANIFEST + len(header.manifest)] = header.manifest
    return bytes(content)


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 90) -> None:
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

"""The parts of check-task that need no process of their own; the rest is in tests/cli/test_workbench_commands.py."""

from __future__ import annotations

import os

import pytest

from mps_trainer.columns import Column
from mps_trainer.config import load_settings
from mps_trainer.launcher.memory_plan import plan_memory
from mps_trainer.workbench.check import describe_column, leave_mps, memory_line, memory_to_ask_for

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("peak", "line"),
    [(0, "0.25GiB"), (204 * MIB, "0.25GiB"), (205 * MIB, "0.5GiB"), (GIB, "1.25GiB"), (8 * GIB, "10GiB")],
)
def test_the_line_for_the_yaml_is_what_the_settings_read_and_the_plan_accepts(peak: int, line: str) -> None:
    asked = memory_to_ask_for(peak)
    assert memory_line(asked) == f"memory: {line}"
    assert load_settings({"memory": line}).memory == asked
    assert plan_memory(80 * GIB, 0, [], dry_step=peak, wish=asked).pool == asked


def test_it_leaves_every_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/theirs")
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G")
    leave_mps()
    left = {key: value for key, value in os.environ.items() if key.startswith("CUDA_MPS")}
    assert left == {"CUDA_MPS_PIPE_DIRECTORY": "/dev/null"}


def test_a_column_on_one_line() -> None:
    tokens = Column(name="tokens", source="response_tokens", dtype="int32", shape=(None,), maximum=4096)
    assert describe_column(tokens) == "tokens: response_tokens, int32, up to 4096, 16.0 KiB"
    number = Column(name="a", source="metrics.a", required=False)
    assert describe_column(number) == "a: metrics.a, float32, optional, 4 B"

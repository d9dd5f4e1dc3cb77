"""Traps that a file leads into are said with the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mps_trainer.launcher.advice import advise
from mps_trainer.launcher.trinity_config import read_trinity_config

YAML = """\
mode: {mode}
checkpoint_root_dir: {root}
algorithm: {{repeat_times: 8}}
buffer: {{batch_size: 8{train}}}
data_processor:
  experience_pipeline:
    operators:
      - {{name: mps_trainer.operator.AuxTrainer, args: {{{args}}}}}
"""


def advice(tmp_path: Path, args: str, mode: str = "both", train: str = "") -> str:
    path = tmp_path / "trinity.yaml"
    path.write_text(YAML.format(mode=mode, root=tmp_path, args=args, train=train))
    return "\n".join(advise(read_trinity_config(path)))


@pytest.mark.parametrize("args", ["use: filter", "use: reward, on_late: drop"])
def test_a_filter_that_leaves_the_trainer_waiting(tmp_path: Path, args: str) -> None:
    said = advice(tmp_path, args)
    assert "waits for 64 experiences" in said
    assert "TimeoutError" in said
    assert advice(tmp_path, args, mode="explore") == ""
    assert advice(tmp_path, args, train=", train_batch_size: 48") == ""
    assert "waits for 128" in advice(tmp_path, args, train=", train_batch_size: 128")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("use: filter, filter: {value: 0.12, per: group}", "less than one"),
        ("use: filter, filter: {value: 0.125, per: group}", ""),
        ("use: filter, task: pass_rate, filter: {drop: top_k, value: 2, per: group}", "one score"),
        ("use: feed, filter: {value: 0.2}", "does nothing with use: feed"),
        ("enabled: false, use: feed, filter: {value: 0.2}", ""),
        ("use: feed", ""),
    ],
)
def test_rules_that_do_nothing(tmp_path: Path, args: str, words: str) -> None:
    said: Any = advice(tmp_path, args, mode="explore")
    assert words in said
    assert bool(said) == bool(words)

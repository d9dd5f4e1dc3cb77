"""`join: env`: the share of every engine in the derived config, and what the user wrote beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mps_trainer.errors import ConfigError
from mps_trainer.launcher import yaml_edit
from mps_trainer.launcher.derived_config import derive
from mps_trainer.launcher.trinity_config import read_trinity_config

Write = Callable[..., Path]
RUN_FILE = Path("/state/runs/0123abcd.json")
MODE = "mode: explore\n"


def lowered(path: Path, share: float | None = 0.8) -> tuple[str, list[str]]:
    """The text of the derived config, and the diff's lines that tell of engines."""
    found = derive(read_trinity_config(path), run_file=RUN_FILE, one_gpu=False, utilization=share)
    lines = [line for line in found.diff.splitlines()[2:] if line[0] in "+-"]
    return found.text, [line for line in lines if not any(k in line for k in ("run_file", "run_host", "ray_namespace"))]


@pytest.mark.parametrize(
    ("explorer", "expected"),
    [
        (
            "explorer:\n  rollout_model:\n    gpu_memory_utilization: 0.95  # most\n    seed: 1\n",
            ["-    gpu_memory_utilization: 0.95  # most", "+    gpu_memory_utilization: 0.8  # most"],
        ),
        (
            'explorer:\n  rollout_model: {seed: 1, gpu_memory_utilization: "0.95"}\n',
            [
                '-  rollout_model: {seed: 1, gpu_memory_utilization: "0.95"}',
                "+  rollout_model: {seed: 1, gpu_memory_utilization: 0.8}",
            ],
        ),
        ("explorer:\n  rollout_model:\n    seed: 1\n", ["+    gpu_memory_utilization: 0.8"]),
        ("explorer:\n  rollout_model:\n", ["-  rollout_model:", '+  rollout_model: {gpu_memory_utilization: 0.8}']),
        ("explorer:\n  name: e\n", ["+  rollout_model:", "+    gpu_memory_utilization: 0.8"]),
        ("", ["+explorer:", "+  rollout_model:", "+    gpu_memory_utilization: 0.8"]),
        (
            "explorer:\n  rollout_model:\n    gpu_memory_utilization: ${oc.decode:${oc.env:SHARE,0.9}}\n",
            [
                "-    gpu_memory_utilization: ${oc.decode:${oc.env:SHARE,0.9}}",
                "+    gpu_memory_utilization: 0.8",
            ],
        ),
        (
            "explorer:\n  rollout_model:\n    gpu_memory_utilization: 0.3\n  auxiliary_models:\n"
            "    - model_path: /judge\n      gpu_memory_utilization: 0.85\n    - model_path: /other\n",
            [
                "-      gpu_memory_utilization: 0.85",
                "+      gpu_memory_utilization: 0.8",
                "+      gpu_memory_utilization: 0.8",
            ],
        ),
    ],
)  # fmt: skip
def test_every_engine_that_asks_for_more_gets_the_plans_share(
    write_config: Write, explorer: str, expected: list[str]
) -> None:
    path = write_config((MODE, explorer + MODE))
    _, changed = lowered(path)
    assert changed == expected


@pytest.mark.parametrize("value", ["0.8", "0.5", "${oc.decode:${oc.env:SHARE,0.5}}"])
def test_who_asks_for_less_keeps_it_and_its_text(write_config: Write, value: str) -> None:
    line = f"    gpu_memory_utilization: {value}  # mine\n"
    path = write_config((MODE, f"explorer:\n  rollout_model:\n{line}{MODE}"))
    text, changed = lowered(path)
    assert changed == []
    assert line in text


def test_without_join_env_nothing_is_lowered_even_what_cannot_be_resolved(write_config: Write) -> None:
    path = write_config((MODE, "explorer: {rollout_model: {gpu_memory_utilization: '${oc.env:NOT_HERE}'}}\n" + MODE))
    assert lowered(path, None)[1] == []
    with pytest.raises(ConfigError, match="cannot be resolved") as caught:
        lowered(path)
    assert caught.value.todo


@pytest.mark.parametrize(
    ("explorer", "words"),
    [
        ("explorer: {rollout_model: {gpu_memory_utilization: lots}}\n", "is 'lots'"),
        ("x: &share 0.9\nexplorer: {rollout_model: {gpu_memory_utilization: *share}}\n", "alias"),
        ("x: &model {gpu_memory_utilization: 0.9}\nexplorer: {rollout_model: *model}\n", "in the way|alias"),
        ("x: &b {gpu_memory_utilization: 0.9}\nexplorer: {rollout_model: {<<: *b, seed: 1}}\n", "merge"),
    ],
)
def test_a_share_that_cannot_be_changed_in_place_is_refused(write_config: Write, explorer: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        lowered(write_config((MODE, explorer + MODE)))
    assert caught.value.todo


def test_a_scalar_is_replaced_with_its_comment_kept() -> None:
    text = "a:\n  - b: 'x'   # why\n"
    edited = yaml_edit.apply(text, [yaml_edit.replace_scalar(text, ("a", 0, "b"), 2)])
    assert edited == "a:\n  - b: 2   # why\n"

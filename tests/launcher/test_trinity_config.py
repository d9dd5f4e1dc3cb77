"""Each way in which a YAML cannot work, with the message that a person gets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mps_trainer.errors import ConfigError
from mps_trainer.launcher.trinity_config import read_trinity_config

Write = Callable[..., Path]


def refused(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_trinity_config(path)
    assert caught.value.todo, "an error without what to do"
    return caught.value


def test_what_a_launch_needs_is_read(write_config: Write, tmp_path: Path) -> None:
    config = read_trinity_config(write_config())
    assert config.ray_namespace == "lab/run"
    assert config.job_dir == tmp_path / "ckpt" / "lab" / "run"
    assert config.runs_dir == tmp_path / "ckpt" / "lab" / "run.mps-trainer"
    assert (config.engine_type, config.total_steps, config.settings.ring_slots) == ("vllm", 2, 2)


def test_a_group_is_part_of_namespace_and_folder(write_config: Write, tmp_path: Path) -> None:
    config = read_trinity_config(write_config(("project: lab", "project: lab\ngroup: a")))
    assert config.ray_namespace == "lab/a/run"
    assert config.job_dir == tmp_path / "ckpt" / "lab" / "a" / "run"


def test_a_missing_file(tmp_path: Path) -> None:
    assert f"no such file: {tmp_path / 'no.yaml'}" in refused(tmp_path / "no.yaml").message


def test_paths_that_are_no_file(tmp_path: Path, write_config: Write) -> None:
    loop, fifo = tmp_path / "loop", tmp_path / "fifo"
    loop.symlink_to(loop)
    os.mkfifo(fifo)
    assert "symbolic links" in refused(loop).message
    assert "Not a directory" in refused(write_config() / "below.yaml").message
    assert "File name too long" in refused(tmp_path / ("x" * 5000)).message
    assert "null byte" in refused(tmp_path / "a\0b").message
    assert "is no regular file" in refused(fifo).message
    assert "is a folder" in refused(tmp_path).message


def test_a_yaml_that_is_nested_too_deeply(write_config: Write) -> None:
    assert "nested too deeply" in refused(write_config(("mode: explore", f"x: {'[' * 2000}{']' * 2000}"))).message


def test_a_number_that_is_too_long(write_config: Write) -> None:
    assert "is no valid YAML" in refused(write_config(("batch_size: 4", f"batch_size: {'9' * 5000}"))).message


def test_a_broken_yaml_names_the_line(write_config: Write) -> None:
    error = refused(write_config(("  batch_size: 4", "  batch_size: [4")))
    assert "line 9" in error.message or "line 8" in error.message


@pytest.mark.parametrize("text", ["[]", "just words", "42"])
def test_a_yaml_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(text)
    refused(path)


def test_no_block_of_ours_lists_what_is_there_and_shows_the_lines(write_config: Write) -> None:
    error = refused(write_config(("mps_trainer.operator.AuxTrainer", "reward_shaping")))
    assert "the operators there are reward_shaping" in error.message
    assert "      - name: mps_trainer.operator.AuxTrainer" in error.todo


def test_no_operators_at_all(tmp_path: Path) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text("mode: explore\n")
    assert "it has no operators at all" in refused(path).message


def test_the_short_name_is_ours_too(write_config: Write) -> None:
    read_trinity_config(write_config(("mps_trainer.operator.AuxTrainer", "aux_trainer")))


def test_two_blocks_of_ours(write_config: Write) -> None:
    error = refused(write_config(("      # ours comes first\n", "      - name: aux_trainer\n")))
    assert "operators[0] and operators[1]" in error.message


def test_an_unknown_key_names_the_nearest(write_config: Write) -> None:
    error = refused(write_config(("ring_slots: 2", "ring_slot_num: 2")))
    assert "ring_slot_num" in error.message
    assert "did you mean 'ring_slot" in error.todo


def test_an_unset_variable_is_named_with_its_key(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_PATH", raising=False)
    error = refused(write_config(("ring_slots: 2", "task_args: {path: '${oc.env:NO_SUCH_PATH}'}")))
    assert "'NO_SUCH_PATH' not found" in error.message
    assert "args.task_args.path" in error.message


def test_an_unset_variable_elsewhere_is_no_business_of_ours(write_config: Write) -> None:
    read_trinity_config(write_config(("${oc.env:HOME}/model", "${oc.env:NO_SUCH_PATH}/model")))


def test_stages_are_refused_by_name(write_config: Write) -> None:
    error = refused(write_config(("buffer:", "stages:\n  - stage_name: warmup\nbuffer:")))
    assert "has stages" in error.message
    assert "one YAML per stage" in error.todo


@pytest.mark.parametrize(("mode", "why"), [("train", "only reads stored experiences"), ("bench", "only evaluates")])
def test_modes_without_an_experience_stream(write_config: Write, mode: str, why: str) -> None:
    assert why in refused(write_config(("mode: explore", f"mode: {mode}"))).message


def test_a_run_file_of_the_users_own(write_config: Write) -> None:
    assert "run_file is set" in refused(write_config(("ring_slots: 2", "run_file: /tmp/x"))).message


def test_a_disabled_block_is_read_and_refuses_nothing(write_config: Write) -> None:
    config = read_trinity_config(write_config(("ring_slots: 2", "enabled: false"), ("mode: explore", "mode: train")))
    assert config.settings.enabled is False

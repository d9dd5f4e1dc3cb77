"""The example's YAML: its settings and its task load, on the tiny model's shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from reward_batches import write_decoder

from mps_trainer.launcher.trinity_config import read_trinity_config
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.worst_case import worst_case_batch
from mps_trainer.tasks import load_task, wire_columns

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_its_settings_and_its_task_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setenv("CPU_ROLLOUT_DIR", str(EXAMPLES / "cpu_rollout"))
    monkeypatch.setenv("CPU_ROLLOUT_WORK", str(tmp_path))
    monkeypatch.setenv("CPU_ROLLOUT_MODEL", str(write_decoder(tmp_path / "model")))
    settings = read_trinity_config(EXAMPLES / "reward_model" / "both.yaml").settings
    assert (settings.use, settings.device) == ("reward", "cpu")
    task = load_task(settings.task, settings.task_args)
    columns = wire_columns(task)
    trainer = Trainer(task, 4, settings.seed)
    trainer.dry_step(worst_case_batch(columns, 4))
    assert {column.source for column in columns} >= {"response_tokens", "reward", "eid.tid"}
    assert settings.replay_capacity <= 4 * settings.batch_size, "runs of one task meet in a training batch"

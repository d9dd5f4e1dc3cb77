from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import broken_tasks
import numpy as np
import pytest
import torch
from torch import nn

from mps_trainer.columns import PackedBatch, PackedColumn
from mps_trainer.config import ScheduleSettings
from mps_trainer.sidecar.checkpoint import Checkpoint, load_newest, save_checkpoint
from mps_trainer.sidecar.rate import rate_factor
from mps_trainer.sidecar.trainer import Trainer

COSINE = ScheduleSettings(rate="cosine", rate_warmup=4, rate_steps=24, rate_end=0.1)


class Groups(broken_tasks.Plain):
    """Two parameter groups with rates of their own, one of them a tensor, as capturable optimizers want it."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        weight, bias = model.parameters()
        return torch.optim.Adam([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": torch.tensor(0.01)}])


def rows() -> PackedBatch:
    ids = PackedColumn(np.frombuffer(b"ab", np.uint8), np.arange(3, dtype=np.int32), True)
    return PackedBatch({"eid": ids, "reward": PackedColumn(np.array([1, 2], np.float32))}, 2)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, {0: 1, 10**6: 1}),
        ({"rate_warmup": 4}, {0: 0.25, 2: 0.75, 3: 1, 4: 1, 10**6: 1}),
        ({"rate": "linear", "rate_steps": 10}, {0: 1, 5: 0.55, 10: 0.1, 99: 0.1}),
        ({"rate": "cosine", "rate_steps": 10, "rate_end": 0}, {0: 1, 5: 0.5, 10: 0, 99: 0}),
        (COSINE.model_dump(), {0: 0.25, 3: 1, 4: 1, 14: 0.55, 24: 0.1, 25: 0.1}),
    ],
)
def test_the_shape_of_each_schedule(schedule: dict[str, Any], expected: dict[int, float]) -> None:
    found = {step: rate_factor(step, ScheduleSettings(**schedule)) for step in expected}
    assert found == pytest.approx(expected)


def test_the_optimizer_of_any_task_follows_and_a_successor_goes_on(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer, successor = (Trainer(Groups(), 8, 0, schedule=COSINE) for _ in range(2))
        trainer.dry_step(rows())
        assert trainer.learning_rate == pytest.approx(0.1 * 0.25), "the dry step does not count"
        for step in range(30):
            for group, rate in zip(trainer.optimizer.param_groups, (0.1, 0.01), strict=True):
                assert float(group["lr"]) == pytest.approx(rate * rate_factor(step, COSINE))
            if step == 17:
                save_checkpoint(tmp_path, trainer, Checkpoint(replay={}, state={}), keep=1)
                load_newest(tmp_path, successor)
            if step >= 17:
                successor.train_step(rows())
                assert successor.learning_rate == pytest.approx(0.1 * rate_factor(step + 1, COSINE))
            trainer.train_step(rows())
    torch.testing.assert_close(dict(trainer.model.state_dict()), dict(successor.model.state_dict()))


def test_without_a_schedule_the_optimizer_is_left_alone() -> None:
    trainer = Trainer(Groups(), 8, 0)
    assert trainer.scheduler is None
    trainer.train_step(rows())
    assert trainer.learning_rate == 0.1

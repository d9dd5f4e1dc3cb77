"""`pass_rate` learns from prompts alone which tasks the policy solves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from token_stream import pack_ragged, pack_text

from mps_trainer.columns import PackedBatch, PackedColumn
from mps_trainer.errors import ConfigError
from mps_trainer.sidecar.auc import area_under_curve
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.tasks import load_task

RUNS = 8


def tasks(rng: np.random.Generator, num_tasks: int) -> tuple[PackedBatch, Any]:
    """Prompts of 40 words of which a task-dependent number are "hard"; each of 8 runs passes by that chance."""
    rates, prompts, rewards, groups = [], [], [], []
    for task in range(num_tasks):
        rate = float(rng.choice([0.05, 0.5, 0.95]))
        hard = rng.random(40) > rate
        prompt = np.where(hard, rng.integers(0, 50, 40), rng.integers(50, 100, 40)).astype(np.int32)
        for _ in range(RUNS):
            rates.append(rate)
            prompts.append(prompt)
            rewards.append(float(rng.random() < rate))
            groups.append(f"t{task}")
    reward = PackedColumn(np.array(rewards, np.float32))
    size = len(rates)
    columns = {
        "eid": pack_text([f"e{i}" for i in range(size)]), "group": pack_text(groups), "reward": reward,
        "outcome": reward, "prompt": pack_ragged(prompts),
    }  # fmt: skip
    return PackedBatch(columns, size), np.array(rates)


def trained(score: str) -> Trainer:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    task = load_task("pass_rate", {"max_tokens": 64, "num_buckets": 256, "score": score})
    trainer = Trainer(task, batch_size=256, seed=0, device="cpu")
    for _ in range(120):
        trainer.train_step(tasks(rng, 32)[0])
    return trainer


def test_it_learns_the_rate_and_which_tasks_teach_nothing() -> None:
    trainer = trained("uninformative")
    held_out, rates = tasks(np.random.default_rng(1), 64)
    pair = trainer.evaluate(held_out)
    assert pair is not None
    assert np.abs(pair[0] - rates).mean() < 0.15, "the predicted rate is near the true one"
    sure = (np.abs(rates - 0.5) > 0.4).astype(np.float32)
    assert area_under_curve(trainer.score(held_out), sure) > 0.95
    scores = trainer.score(held_out).reshape(-1, RUNS)
    assert np.allclose(scores, scores[:, :1], atol=1e-6), "all runs of a task have one score"
    assert scores.min() >= 0
    assert scores.max() <= 1


@pytest.mark.parametrize("args", [{"score": "hard"}, {"num_buckets": 0}, {"depth": -1}])
def test_arguments_that_make_no_sense_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(args))):
        load_task("pass_rate", args)

"""`token_outlier` finds odd responses with no label, no reward and no feature vector."""

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
from mps_trainer.tasks import TaskBatch, load_task
from mps_trainer.tasks.token_outlier import NUM_FEATURES, GaussianDensity

ODD = ("repeats", "surprising", "long")


def responses(rng: np.random.Generator, size: int, odd: str, share: float = 0.1) -> tuple[PackedBatch, Any]:
    """Ordinary responses, and among them a share that repeats one token, is improbable, or is four times as long."""
    is_odd = rng.random(size) < share
    tokens, logprobs = [], []
    for strange in is_odd:
        length = int(rng.integers(30, 60)) * (4 if strange and odd == "long" else 1)
        row = rng.integers(0, 300, length)
        row = np.full(length, row[0]) if strange and odd == "repeats" else row
        tokens.append(row.astype(np.int32))
        scale = 4.0 if strange and odd == "surprising" else 1.0
        logprobs.append((-rng.gamma(1.0, scale, length)).astype(np.float32))
    columns = {
        "eid": pack_text([f"e{i}" for i in range(size)]),
        "group": pack_text(["t0"] * size),
        "reward": PackedColumn(np.zeros(size, np.float32)),
        "tokens": pack_ragged(tokens),
        "logprobs": pack_ragged(logprobs),
    }
    return PackedBatch(columns, size), is_odd


@pytest.mark.parametrize("odd", ODD)
def test_it_learns_what_is_ordinary(odd: str) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    trainer = Trainer(load_task("token_outlier", {"max_tokens": 256}), batch_size=256, seed=0, device="cpu")
    losses = [trainer.train_step(responses(rng, 256, odd)[0]) for _ in range(150)]
    held_out, is_odd = responses(rng, 512, odd)
    area = area_under_curve(trainer.score(held_out), is_odd.astype(np.float32))
    assert area > 0.97, f"AUC {area} for responses of the kind {odd}"
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.2


def test_the_density_is_a_density() -> None:
    """In one dimension with the factor at e^a, exp(-score) must integrate to one."""
    model = GaussianDensity(1, momentum=0.1).eval()
    with torch.no_grad():
        model.log_diagonal.fill_(0.7)
        model.mean.fill_(0.3)
        grid = torch.linspace(-7.5, 7.5, 20001).unsqueeze(1)
        total = torch.trapezoid(torch.exp(-model(grid)), grid.squeeze(1))
    assert total.item() == pytest.approx(1.0, abs=1e-3)


def test_empty_rows_and_one_row_have_finite_scores() -> None:
    task = load_task("token_outlier", {"max_tokens": 8})
    trainer = Trainer(task, batch_size=4, seed=0, device="cpu")
    columns = {
        "eid": pack_text(["a", "b"]),
        "group": pack_text(["g", "g"]),
        "reward": PackedColumn(np.zeros(2, np.float32)),
        "tokens": pack_ragged([np.zeros(0, np.int32), np.ones(1, np.int32)]),
        "logprobs": pack_ragged([np.zeros(0, np.float32), np.full(1, -np.float32(3e38))]),
    }
    batch = PackedBatch(columns, 2)
    assert np.isfinite(trainer.train_step(batch))
    assert np.isfinite(trainer.score(batch)).all()
    assert task._features(TaskBatch.from_packed(batch)).shape == (2, NUM_FEATURES)  # type: ignore[attr-defined]


@pytest.mark.parametrize("args", [{"max_tokens": 0}, {"num_buckets": 1.5}, {"momentum": 0}, {"contamination": 1}])
def test_arguments_that_make_no_sense_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(args))):
        load_task("token_outlier", args)

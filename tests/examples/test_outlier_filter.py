"""The example learns, and its scores find the planted outliers."""

import sys
from pathlib import Path

import pytest
import torch

from mps_trainer.tasks.batch import TaskBatch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def task(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/outlier_filter"))
    from outlier_filter import OutlierFilter

    yield OutlierFilter(input_dim=16)
    del sys.modules["outlier_filter"]


def test_it_is_as_short_as_the_docs_say():
    assert len((ROOT / "examples/outlier_filter/outlier_filter.py").read_text().splitlines()) < 60


def test_planted_outliers_score_highest(task):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2048, 16, generator=generator)
    clean = (hidden @ torch.randn(16, generator=generator) > 0).float()
    planted = torch.rand(2048, generator=generator) < 0.05
    reward = torch.where(planted, 1 - clean, clean)
    batch = TaskBatch({"hidden_state": hidden, "reward": reward, "group_mean": torch.full((2048,), 0.5)}, {}, 2048)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.optimizer(model)
    for _ in range(100):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    with torch.inference_mode():
        highest = task.score(model, batch).topk(int(planted.sum())).indices
    assert planted[highest].float().mean() > 0.7

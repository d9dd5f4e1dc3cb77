"""The task's own step against the CPU; there is no GPU here, so what differs on it is made up, and named so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mps_trainer.columns import PackedBatch
from mps_trainer.errors import PlacementError
from mps_trainer.sidecar.gpu import task_numerics
from mps_trainer.sidecar.gpu.task_numerics import check_task_step
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.worst_case import worst_case_batch
from mps_trainer.tasks import TaskBatch, load_task, wire_columns


def made(task: str = "preference_classifier", **args: Any) -> tuple[Trainer, PackedBatch]:
    found = load_task(task, {"max_tokens": 32, **args})
    return Trainer(found, 64, 0), worst_case_batch(wire_columns(found), 64)


@pytest.mark.parametrize("task", ["preference_classifier", "token_outlier", "pass_rate"])
def test_a_built_in_task_is_compared_and_left_as_it_was(task: str) -> None:
    trainer, worst = made(task)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    random = torch.get_rng_state()
    assert check_task_step(trainer, worst, 100) == "right"
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize("wrong", [1.2, float("nan")])
def test_a_mocked_gpu_with_wrong_products_is_refused_under_a_share(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: float
) -> None:
    trainer, worst = made()
    right, calls = trainer.task.loss, []

    def loss(model: nn.Module, batch: TaskBatch) -> Tensor:
        calls.append(model)
        # The first two calls are the GPU's.
        return right(model, batch) * (wrong if len(calls) < 3 else 1.0)

    monkeypatch.setattr(trainer.task, "loss", loss)
    with pytest.raises(PlacementError, match="own step is wrong"):
        check_task_step(trainer, worst, 40)
    calls.clear()
    assert "own step is wrong" in check_task_step(trainer, worst, 100)
    assert "own step is wrong" in caplog.text


def test_what_cannot_be_compared_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, worst = made()
    right, factors = trainer.task.loss, iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(trainer.task, "loss", lambda model, batch: right(model, batch) * next(factors))
    assert "two steps on the same batch differ" in check_task_step(trainer, worst, 40)

    def only_on_a_gpu(model: nn.Module, batch: TaskBatch) -> Tensor:
        raise RuntimeError("expected a CUDA tensor\nand more")

    monkeypatch.setattr(trainer.task, "loss", only_on_a_gpu)
    assert check_task_step(trainer, worst, 40) == "not compared with the CPU: RuntimeError: expected a CUDA tensor"
    monkeypatch.setattr(task_numerics, "_MOST_FLOPS", 1e3)
    assert "GFLOP" in check_task_step(trainer, worst, 40)

"""The task of `gpu_poison.py`: some marks of a batch kill the process that computes it, another hangs it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mps_trainer import AuxiliaryTask, Column, TaskBatch

GOOD, ASSERTS_IN_LOSS, HANGS_IN_SCORE, ASSERTS_IN_SCORE = 1.0, -1.0, -2.0, -3.0


class Poisoned(AuxiliaryTask):
    """An embedding with too few rows for one mark; a reward of 1 or of a made-up batch is row 0."""

    def columns(self) -> list[Column]:
        return []

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(4, 256), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return (self._predict(model, batch, ASSERTS_IN_LOSS) - batch["reward"]).square().mean()

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        if bool((batch["reward"] == HANGS_IN_SCORE).any()):
            while True:
                time.sleep(0.05)
        return self._predict(model, batch, ASSERTS_IN_SCORE)

    @staticmethod
    def _predict(model: nn.Module, batch: TaskBatch, mark: float) -> Tensor:
        marked = batch["reward"] == mark
        if batch["reward"].device.type == "cpu" and bool(marked.any()):
            raise RuntimeError("CUDA error: device-side assert triggered (a rehearsal)")
        predicted: Tensor = model(torch.where(marked, 1_000_000, 0))
        return predicted.squeeze(1)


def rows(name: str, mark: float) -> dict[str, Any]:
    reward = np.full(16, GOOD, np.float32)
    reward[3] = mark
    return {"eid": [f"{name}-{i}" for i in range(16)], "group": [name] * 16, "reward": reward}

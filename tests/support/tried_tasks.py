"""Tasks for probation: one that is good, and others that fail, each in its own way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mps_trainer import AuxiliaryTask, Column, TaskBatch


class Good(AuxiliaryTask):
    """Scores by the share of each token; takes sequences of any length."""

    def columns(self) -> list[Column]:
        return [
            Column(name="tokens", source="response_tokens", dtype="int32", shape=(None,), maximum=64),
            Column(name="words", source="response_text", dtype="text", maximum=32),
        ]

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return (self.score(model, batch) - batch["reward"]).square().mean()

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return model(batch.ragged("tokens").mean().tanh().unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Frozen(Good):
    """Good too, although its attributes cannot be set."""

    width: int = 1


class SmallVocabulary(Good):
    """Good, as long as its tokens are below 8."""

    def build_model(self) -> nn.Module:
        return nn.EmbeddingBag(8, 1)

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        tokens = batch.ragged("tokens")
        return model(tokens.values.long(), tokens.offsets[:-1]).squeeze(1)


class Nan(Good):
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return super().loss(model, batch) * torch.nan


class MeanOfNothing(Good):
    """Divides by the length of each sequence."""

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        tokens = batch.ragged("tokens")
        return model((tokens.mean() * tokens.lengths / tokens.lengths).unsqueeze(1)).squeeze(1)


class WrongShape(Good):
    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return super().score(model, batch).unsqueeze(1)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return self.score(model, batch).square().mean()


class WrongDtype(Good):
    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return super().score(model, batch) > 0

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return Good.score(self, model, batch).square().mean()


class SteepSlope(Good):
    """Its loss is finite, and its slope is not."""

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return (self.score(model, batch) * 0).sqrt().mean()


class LearnsNothing(Good):
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return super().loss(model, batch) * 0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)


class ChangesItsBatch(Good):
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        loss = super().loss(model, batch)
        batch["reward"].mul_(2).add_(1)
        return loss


class Exits(Good):
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        sys.exit(5)


class ExitsAtOnce(Good):
    def __init__(self) -> None:
        sys.exit(5)


class ExitsHard(Good):
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        os._exit(0)


class Aborts(Good):
    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        if batch.size == 1:
            os.abort()
        return super().score(model, batch)


class Hangs(Good):
    """And has a helper, which holds every descriptor."""

    def build_model(self) -> nn.Module:
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], close_fds=False)
        print(f"helper {helper.pid}", flush=True)
        return super().build_model()

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        threading.Event().wait()
        raise AssertionError


class TooLarge(Good):
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return super().loss(model, batch) + 0 * torch.ones(2**30).sum()


class ForksAtOnce(Good):
    def __init__(self) -> None:
        pid = os.fork()
        if not pid:
            os._exit(1)
        os.waitpid(pid, 0)

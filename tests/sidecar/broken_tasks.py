"""Tasks that fail, each in its own way."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from mps_trainer import AuxiliaryTask, Column, TaskBatch


class Plain(AuxiliaryTask):
    """A line through the reward; the base of the others."""

    def columns(self) -> list[Column]:
        return []

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return model(batch["reward"].unsqueeze(1)).square().mean()

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return model(batch["reward"].unsqueeze(1)).squeeze(1)


class RaisesInLoss(Plain):
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        raise KeyError("no such layer")


class WrongShape(Plain):
    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return model(batch["reward"].unsqueeze(1))


class NanWhenNegative(Plain):
    """Its loss is NaN once a batch holds an experience with reward -1; the dry step never has exactly that."""

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        loss = super().loss(model, batch)
        return loss * torch.nan if bool((batch["reward"] == -1).any()) else loss


class TextLength(Plain):
    """Not broken: scores an experience by the length of its text."""

    def columns(self) -> list[Column]:
        return [Column(name="words", source="response_text", dtype="text", maximum=64)]

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return torch.tensor([float(len(text)) for text in batch.texts["words"]])


class HangsInBuild(Plain):
    """Says so in the file of $TASK_MARK, then waits; a signal's exception does not help."""

    def build_model(self) -> nn.Module:
        Path(os.environ["TASK_MARK"]).write_text("")
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(60)


class ForksInBuild(Plain):
    """Has a helper that outlives the sidecar; $TASK_MARK holds its pid."""

    def build_model(self) -> nn.Module:
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            signal.pause()
            os._exit(0)
        with Path(os.environ["TASK_MARK"]).open("a") as file:
            file.write(f"{pid}\n")
        return super().build_model()

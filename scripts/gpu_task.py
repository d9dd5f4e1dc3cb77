"""The auxiliary task of the GPU scripts: a classifier that notes its memory, and that misbehaves on command.

Whoever wants it to misbehave writes a word into the file of $GPU_TASK_COMMAND; the task takes it away first, so
that a restarted sidecar learns on. Free bytes of the device are noted in $GPU_TASK_MEMORY, one line a second at most.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mps_trainer import AuxiliaryTask, Column, TaskBatch

COMMAND_VARIABLE, MEMORY_VARIABLE = "GPU_TASK_COMMAND", "GPU_TASK_MEMORY"
WIDTH = 1536


class MemoryNotes:
    """Appends PID, time, free bytes of the device and PyTorch's share to the file of $GPU_TASK_MEMORY."""

    def __init__(self) -> None:
        self._path = os.environ.get(MEMORY_VARIABLE, "")
        self._noted = time.monotonic()

    def note(self) -> None:
        if not self._path or time.monotonic() - self._noted < 1.0:
            return
        self._noted = time.monotonic()
        free, _ = torch.cuda.mem_get_info()
        line = f"{os.getpid()} {time.monotonic():.3f} {free} {torch.cuda.memory_reserved()}\n"
        with open(self._path, "a") as file:
            file.write(line)


class DrillTask(AuxiliaryTask):
    """Does the reward exceed one half? From a feature vector."""

    def __init__(self) -> None:
        self._command = Path(os.environ.get(COMMAND_VARIABLE, os.devnull))
        self._memory = MemoryNotes()

    def columns(self) -> Sequence[Column]:
        return [Column(name="features", source="info.features", shape=(WIDTH,))]

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        self._memory.note()
        logits: Tensor = model(batch["features"]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, (batch["reward"] > 0.5).float())
        return self._misbehave(loss)

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return torch.sigmoid(model(batch["features"]).squeeze(1))

    def _misbehave(self, loss: Tensor) -> Tensor:
        if not self._command.is_file():
            return loss
        word = self._command.read_text()
        self._command.unlink()
        if word == "exception":
            raise ValueError("the drill wants it")
        if word == "nan":
            return loss * math.nan
        if word == "oom":
            return loss + torch.empty(64 * 2**30, dtype=torch.uint8, device=loss.device)[0]
        if word == "exit":
            os._exit(7)
        if word == "assert":
            return loss + torch.zeros(4, device=loss.device)[torch.tensor([9], device=loss.device)].sum()
        a = torch.randn(4096, 4096, device=loss.device)
        while word == "hang":
            a @ a
        return loss

"""For `gpu_step_shapes.py`: an auxiliary model with fixed batches, from fixed weights, and what its weights should be.

`reference` trains in float32 (no autocast, no TF32) at 100 % of the SMs and keeps first weights, last weights and
losses in a folder. A `Subject` begins at those first weights and compares itself with the last ones. Products in
float32 were right under every share of the SMs.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from mps_trainer.bench.models import MlpClassifier, RewardModel
from mps_trainer.tasks import TaskBatch
from mps_trainer.tasks.batch import Ragged

TASKS: dict[str, Any] = {"A": MlpClassifier, "B": RewardModel}
#: Training steps after which weights are compared.
STEPS = 4
#: Of the norm of the difference to the reference's weights, relative to the norm of what the reference has changed.
#: A is float32: 0.001 on a CPU. B's products are bf16, and AdamW turns the sign of a tiny gradient into a whole step:
#: 0.05 on a CPU with 8 x 64 tokens. What was never written gives about 1.
TOLERANCE = {"A": 0.05, "B": 0.3}


class Padded(Ragged):
    """Sequences that are padded already, `offsets` their lengths: padding on the device waits for it, which a CUDA
    graph cannot hold."""

    @property
    def lengths(self) -> Tensor:
        return self.offsets

    def padded(self, length: int, fill: float = 0) -> Tensor:
        return self.values


def host_batches(name: str, sizes: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The batches, one for each step; the same in every process."""
    arguments, size = sizes[name]
    task = TASKS[name](**arguments)
    rng = np.random.default_rng(1)
    found = []
    for _ in range(STEPS):
        reward = torch.from_numpy(rng.random(size, np.float32))
        if name == "A":
            features = torch.from_numpy(rng.standard_normal((size, task.width), np.float32))
            found.append({"features": features, "reward": reward})
            continue
        tokens = torch.from_numpy(rng.integers(0, task.vocabulary, (size, task.max_tokens), np.int32))
        lengths = torch.from_numpy(rng.integers(task.max_tokens // 4, task.max_tokens + 1, size))
        found.append({"tokens": tokens, "lengths": lengths, "reward": reward})
    return found


class Subject:
    """One model; its inputs stay where they are, each step copies a batch into them.

    Attributes:
        optimizer: set by whoever chooses its kind.
        callee: what the task calls as its model; the model, or a compiled form of it.
    """

    def __init__(self, name: str, sizes: dict[str, Any], device: str, folder: Path | None = None) -> None:
        self.name, self.device = name, torch.device(device)
        self.task = TASKS[name](**sizes[name][0])
        torch.manual_seed(0)
        with self.device:
            self.model = self.task.build_model()
        self.callee: Any = self.model.train()
        self.parameters = list(self.model.parameters())
        self._host = host_batches(name, sizes)
        if self.device.type == "cuda":
            self._host = [{key: value.pin_memory() for key, value in batch.items()} for batch in self._host]
        self._inputs = {key: value.to(self.device, copy=True) for key, value in self._host[0].items()}
        self.optimizer: torch.optim.Optimizer | None = None
        self.first = self._read(folder, "first") if folder else [p.detach().clone() for p in self.parameters]
        self.last = self._read(folder, "last") if folder else []
        self.losses = json.loads((folder / f"{name}-losses.json").read_text()) if folder else []
        if folder:
            self._to_first()

    def adamw(self, **how: Any) -> torch.optim.Optimizer:
        """The task's optimizer in another form."""
        rate, decay = self.task.learning_rate, self.task.weight_decay
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=decay, **how)
        return self.optimizer

    def load(self, number: int) -> None:
        """Copy a batch into the inputs; does not wait."""
        for key, value in self._host[number % STEPS].items():
            self._inputs[key].copy_(value, non_blocking=True)

    def loss(self, piece: int = 0, pieces: int = 1) -> Tensor:
        """The mean over a part of the batch in the inputs."""
        size = len(self._inputs["reward"]) // pieces
        part = {key: value[piece * size : (piece + 1) * size] for key, value in self._inputs.items()}
        tensors: dict[str, Any] = {"reward": part["reward"]}
        if self.name == "A":
            tensors["features"] = part["features"]
        else:
            tensors["tokens"] = Padded(part["tokens"], part["lengths"])
        found: Tensor = self.task.loss(self.callee, TaskBatch(tensors, {}, size))
        return found

    def reset(self) -> None:
        """To the first weights, in place: a CUDA graph knows these addresses."""
        self._to_first()
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def compare(self, losses: list[float]) -> dict[str, Any]:
        """How far the weights are off after `STEPS` steps from `reset`, as `TOLERANCE` says; None: not finite."""
        off = changed = 0.0
        with torch.no_grad():
            for parameter, first, last in zip(self.parameters, self.first, self.last, strict=True):
                wrong = float((parameter - last).square().sum())
                moved = float((last - first).square().sum())
                off, changed = off + wrong, changed + moved
        update = math.sqrt(off / max(changed, 1e-30)) if math.isfinite(off) else math.inf
        pairs = zip(losses, self.losses, strict=True)
        of_losses = max(abs(a - b) / max(abs(b), 1e-6) if a == a else math.inf for a, b in pairs)
        return {
            "update off by": _number(update), "loss off by": _number(of_losses), "tolerance": TOLERANCE[self.name],
            "right": update <= TOLERANCE[self.name],
        }  # fmt: skip

    def save_reference(self, folder: Path, losses: list[float]) -> None:
        """What `folder` gives to others."""
        for what, tensors in (("first", self.first), ("last", self.parameters)):
            flat = torch.cat([t.detach().flatten().float().cpu() for t in tensors])
            np.save(folder / f"{self.name}-{what}.npy", flat.numpy())
        (folder / f"{self.name}-losses.json").write_text(json.dumps(losses))

    def _to_first(self) -> None:
        with torch.no_grad():
            for parameter, first in zip(self.parameters, self.first, strict=True):
                parameter.copy_(first)

    def _read(self, folder: Path, what: str) -> list[Tensor]:
        flat = torch.from_numpy(np.load(folder / f"{self.name}-{what}.npy")).to(self.device)
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def reference(names: list[str], sizes: dict[str, Any], device: str, folder: str) -> dict[str, Any]:
    """Train each task in float32 and keep it; the losses."""
    found = {}
    # The benchmark's B asks for bf16 in its forward pass.
    with patch.object(torch, "autocast", lambda *_, **__: nullcontext()):
        for name in names:
            subject = Subject(name, sizes, device)
            optimizer = subject.adamw(foreach=False, fused=False)
            losses = []
            for number in range(STEPS):
                subject.load(number)
                optimizer.zero_grad(set_to_none=True)
                loss = subject.loss()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(float(loss.item()))
            subject.save_reference(Path(folder), losses)
            found[name] = losses
            if subject.device.type == "cuda":
                torch.cuda.synchronize()
    return found


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None

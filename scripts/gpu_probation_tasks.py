"""Tasks for gpu_probation.py: a good one, and others that break a GPU, each in its own way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mps_trainer import AuxiliaryTask, Column, TaskBatch

FAR = 2**38


class Good(AuxiliaryTask):
    """A small MLP on a feature vector."""

    def columns(self) -> list[Column]:
        return [
            Column(name="feature", source="info.feature", shape=(1536,)),
            Column(name="tokens", source="response_tokens", dtype="int32", shape=(None,), maximum=64),
        ]

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1536, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.score(model, batch), batch["reward"])

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return model(batch["feature"]).squeeze(1)


class OutOfRange(Good):
    """Looks up a response's length in a table that is too short for it: a device-side assert."""

    def build_model(self) -> nn.Module:
        return nn.Embedding(8, 1)

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return model(batch.ragged("tokens").lengths).squeeze(1)


class IllegalAddress(Good):
    """Has a kernel that writes where no memory is."""

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        write_nowhere(batch["reward"].device)
        return super().loss(model, batch)


class LongKernel(Good):
    """Has a product that takes an H200 about 11 ms."""

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        with torch.no_grad():
            a = torch.ones(16384, 16384, dtype=torch.bfloat16, device=batch["reward"].device)
            zero = (a @ a)[0, 0].float() * 0
        return super().loss(model, batch) + zero


class TooLarge(Good):
    """Takes 8 GiB; `memory` is 4."""

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return (
            super().loss(model, batch) + 0 * torch.empty(8 * 2**30, dtype=torch.int8, device=batch["reward"].device)[0]
        )


def write_nowhere(device: torch.device) -> None:
    """A kernel of PyTorch that writes 1 TiB behind a small tensor: an illegal memory access."""
    small = torch.zeros(1024, device=device)
    # An interface of arrays of other libraries, which PyTorch believes: it does not know how large the memory is.
    interface: dict[str, Any] = {**small.__cuda_array_interface__, "shape": (2 * FAR,), "strides": None}
    claimed = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
    claimed[FAR : FAR + 1024].fill_(1.0)
    torch.cuda.synchronize(device)


def control() -> None:
    """The same access in a client of MPS: what would happen without probation."""
    write_nowhere(torch.device("cuda:0"))

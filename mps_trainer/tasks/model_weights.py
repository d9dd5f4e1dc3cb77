"""A model's weights as named bytes and back: what a snapshot in shared memory holds. No code travels, only numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from mps_trainer.errors import TaskError
from mps_trainer.transport import WeightsEntry
from mps_trainer.transport.weights_layout import DTYPE_BYTES


def describe_weights(model: nn.Module) -> list[WeightsEntry]:
    """Name, dtype and shape of each tensor of the model's state_dict; TaskError for what is no plain tensor."""
    return [_entry(name, value) for name, value in model.state_dict().items()]


def weights_bytes(model: nn.Module) -> Iterator[memoryview]:
    """The bytes of each tensor as `describe_weights` orders them; copied from the GPU one by one, views on the CPU."""
    return map(_bytes, model.state_dict().values())


def load_weights(model: nn.Module, tensors: Iterable[tuple[WeightsEntry, memoryview]]) -> None:
    """Copy named bytes into the model; TaskError when they are not those of this model."""
    state = {entry.name: _tensor(entry, raw) for entry, raw in tensors}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise TaskError(
            f"the sidecar's model is another one than build_model() makes in the operator: {error}",
            "install the same version of the task for both, or use score_where: sidecar",
        ) from error


def _entry(name: str, value: object) -> WeightsEntry:
    dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor) or dtype not in DTYPE_BYTES or value.layout is not torch.strided:
        raise TaskError(
            f"the model's state_dict holds {name} of {dtype}, which cannot be put into shared memory",
            f"use tensors of {', '.join(DTYPE_BYTES)}, or score_where: sidecar",
        )
    return WeightsEntry(name, dtype, tuple(value.shape))


def _bytes(value: Tensor) -> memoryview:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _tensor(entry: WeightsEntry, raw: memoryview) -> Tensor:
    # Of the closed list of names in DTYPE_BYTES, which the reader of the manifest has checked.
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if not raw.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(entry.shape)

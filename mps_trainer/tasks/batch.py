"""A batch of experiences as tensors, the way a task sees it.

Shape legend: B experiences, D the width of a vector column, T the sum of all lengths of a ragged column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mps_trainer.columns import Array, PackedBatch, PackedColumn


@dataclass(frozen=True)
class Ragged:
    """Sequences of different lengths without padding: row i is values[offsets[i]:offsets[i + 1]].

    Attributes:
        values: (T,) in the column's dtype.
        offsets: (B + 1,) int64.
    """

    values: Tensor
    offsets: Tensor

    # Kept, both: beside a busy engine each operation costs a task a quarter of a millisecond.
    @cached_property
    def lengths(self) -> Tensor:
        """(B,) int64."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def row_index(self) -> Tensor:
        """(T,) int64: the row that each value belongs to, for `index_add_` and `scatter`."""
        rows = torch.arange(len(self.offsets) - 1, device=self.offsets.device)
        # Without the size PyTorch adds the lengths up and waits for a GPU to tell.
        return torch.repeat_interleave(rows, self.lengths, output_size=len(self.values))

    def mean(self) -> Tensor:
        """(B,) float32: the mean of each row; 0 for an empty one."""
        return self.mean_of(self.values)

    def mean_of(self, values: Tensor) -> Tensor:
        """(B,) or (B, K) float32: the mean over each row of `values`, (T,) or (T, K), which belong to the same rows."""
        total = torch.zeros(len(self.offsets) - 1, *values.shape[1:], device=values.device)
        total.index_add_(0, self.row_index, values.float())
        lengths = self.lengths.clamp(min=1)
        return total / (lengths if values.dim() == 1 else lengths.unsqueeze(1))

    def padded(self, length: int, fill: float = 0) -> Tensor:
        """(B, length): every row cut or filled up to `length`."""
        out = torch.full((len(self.offsets) - 1, length), fill, dtype=self.values.dtype, device=self.values.device)
        column = torch.arange(len(self.values), device=self.values.device) - self.offsets[:-1][self.row_index]
        keep = column < length
        out[self.row_index[keep], column[keep]] = self.values[keep]
        return out


@dataclass(frozen=True)
class TaskBatch:
    """B experiences. `batch["name"]` is the column that the task declared under that name.

    A scalar column is a Tensor (B,), a vector column a Tensor (B, D), a sequence a `Ragged`. `texts` holds the
    text columns as lists of B strings; `eid`, `group` and `reward` are there for every task. `made` is what
    `once` has made.
    """

    tensors: Mapping[str, Tensor | Ragged]
    texts: Mapping[str, list[str]]
    size: int
    made: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            hint = (
                f"it is text: use batch.texts[{name!r}]"
                if name in self.texts
                else f"there is {', '.join(self.tensors)}"
            )
            raise KeyError(f"no column {name!r}; {hint}")
        value = self.tensors[name]
        assert isinstance(value, Tensor), f"column {name!r} is a sequence; use batch.ragged({name!r})"
        return value

    def ragged(self, name: str) -> Ragged:
        """The sequence column `name`."""
        value = self.tensors[name]
        assert isinstance(value, Ragged), f"column {name!r} is no sequence; use batch[{name!r}]"
        return value

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives, made once for these experiences: features that `score` and `predictions` both read, say.

        It may depend on the batch and on the task's settings, never on the model, and nobody may change it in place.
        """
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    @classmethod
    def from_packed(
        cls,
        packed: PackedBatch,
        device: torch.device | str = "cpu",
        copy: Callable[[Array], Tensor] | None = None,
    ) -> TaskBatch:
        """Copy a packed batch to `device`. Nothing of the result aliases the ring.

        `copy` is used in place of a plain copy: it makes a tensor of its own on `device`
        of an array that it only reads.
        """
        copy = copy or (lambda array: _to(array, device))
        tensors: dict[str, Tensor | Ragged] = {}
        for name, column in packed.columns.items():
            if column.offsets is None:
                tensors[name] = copy(column.values)
            elif not column.is_text:
                tensors[name] = Ragged(copy(column.values), copy(column.offsets).long())
        # Last, because the copies may be under way by themselves meanwhile.
        texts = {name: _texts(column) for name, column in packed.columns.items() if column.is_text}
        return cls(tensors, texts, packed.num_rows)


def _texts(column: PackedColumn) -> list[str]:
    assert column.offsets is not None
    raw, ends = column.values.tobytes(), column.offsets.tolist()
    return [raw[begin:end].decode("utf-8", "replace") for begin, end in pairwise(ends)]


def _to(array: Array, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.array(array, copy=True)).to(device)

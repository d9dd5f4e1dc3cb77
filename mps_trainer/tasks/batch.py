"""A batch of experiences as tensors, the way a task sees it.

Shape legend: B experiences, D the width of a vector column, T the sum of all lengths of a ragged column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

    @property
    def lengths(self) -> Tensor:
        """(B,) int64."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def row_index(self) -> Tensor:
        """(T,) int64: the row that each value belongs to, for `index_add_` and `scatter`."""
        rows = torch.arange(len(self.offsets) - 1, device=self.offsets.device)
        return torch.repeat_interleave(rows, self.lengths)

    def mean(self) -> Tensor:
        """(B,) float32: the mean of each row; 0 for an empty one."""
        total = torch.zeros(len(self.offsets) - 1, device=self.values.device)
        total.index_add_(0, self.row_index, self.values.float())
        return total / self.lengths.clamp(min=1)

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
    text columns as lists of B strings; `eid`, `group` and `reward` are there for every task.
    """

    tensors: Mapping[str, Tensor | Ragged]
    texts: Mapping[str, list[str]]
    size: int

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

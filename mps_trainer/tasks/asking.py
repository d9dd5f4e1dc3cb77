"""Asking a model about experiences: bounded parts of a batch, and what a task gives back as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from mps_trainer.columns import Array, PackedBatch, PackedColumn


def parts_of(packed: PackedBatch, size: int) -> Iterator[tuple[int, PackedBatch]]:
    """(first row, part) of at most `size` rows each; one part, empty, of an empty batch."""
    if packed.num_rows <= size:
        yield 0, packed
        return
    for start in range(0, packed.num_rows, size):
        yield start, rows_of(packed, start, min(start + size, packed.num_rows))


def rows_of(packed: PackedBatch, start: int, stop: int) -> PackedBatch:
    """Rows from `start` to before `stop`: views, but for the offsets."""
    columns = {}
    for name, column in packed.columns.items():
        if column.offsets is None:
            columns[name] = PackedColumn(column.values[start:stop])
        else:
            offsets = column.offsets[start : stop + 1]
            values = column.values[offsets[0] : offsets[-1]]
            columns[name] = PackedColumn(values, offsets - offsets[0], column.is_text)
    return PackedBatch(columns, stop - start)


def check_tensor(what: str, value: Any, shape: tuple[int, ...]) -> None:
    """ValueError unless `value`, which `what` gave, is a tensor of that shape."""
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(type(value))
        raise ValueError(f"{what}() gave {found}; it must give a tensor of shape {shape}")


def to_numbers(what: str, value: Any, num_rows: int) -> Array:
    """(num_rows,) float32 of what `what` gave; ValueError for any other shape."""
    check_tensor(what, value, (num_rows,))
    return np.asarray(value.float().cpu().numpy())

"""What one experience takes in the replay buffer, in bytes of the host's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mps_trainer.columns import Array, Column, PackedBatch

#: A numpy array of its own (its object and malloc's share), and the pointer to it.
ARRAY_BYTES = 136
#: Number, draws, bytes, priority, class.
_TAG_BYTES = 5 * 8


def held_row_bytes(batch: PackedBatch, rows: Array) -> Array:
    """(n,) int64: what each of these rows of a batch takes once it is held."""
    sizes = np.full(len(rows), _TAG_BYTES, np.int64)
    for column in batch.columns.values():
        item = column.values.dtype.itemsize
        if column.offsets is None:
            sizes += item * (column.values.shape[1] if column.values.ndim > 1 else 1)
        else:
            sizes += np.diff(column.offsets.astype(np.int64))[rows] * item + ARRAY_BYTES
    return sizes


def smallest_row_bytes(columns: Sequence[Column]) -> int:
    """Of an experience whose sequences are all empty."""
    return _TAG_BYTES + sum(
        ARRAY_BYTES if column.kind in ("ragged", "text") else column.max_row_bytes for column in columns
    )


def largest_row_bytes(columns: Sequence[Column]) -> int:
    """Of an experience whose sequences are all at their maximum."""
    longest = 0
    for column in columns:
        if column.kind in ("ragged", "text"):
            item = 1 if column.kind == "text" else np.dtype(column.dtype).itemsize
            longest += (column.maximum or 0) * item
    return smallest_row_bytes(columns) + longest

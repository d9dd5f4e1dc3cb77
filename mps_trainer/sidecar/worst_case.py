"""The largest batch that the declared columns allow, made up, for the dry step before READY."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mps_trainer.columns import Array, Column, PackedBatch, PackedColumn

#: Runs of one task among made-up experiences, for tasks that compare them.
RUNS = 4


def worst_case_batch(columns: Sequence[Column], num_rows: int) -> PackedBatch:
    """`num_rows` experiences with every sequence at its maximum.

    Whole numbers are 0 or 1, because a token id or a class that the task cannot know would be no fault of it; and a
    sequence begins with 1. Id 0 is the pad of many vocabularies, with an embedding of zeros: ahead of every other token
    such zeros stay zeros in all layers, where RMSNorm's gradient is 1 / sqrt(eps), and 24 layers of it overflow.
    Floats lie in [0.01, 0.99]: a reward that is a label, a probability and a number to take the logarithm of.
    """
    rng = np.random.default_rng(0)
    return PackedBatch({column.name: _column(column, num_rows, rng) for column in columns}, num_rows)


def _column(column: Column, num_rows: int, rng: np.random.Generator) -> PackedColumn:
    if column.kind == "text":
        runs = RUNS if column.name == "group" else 1
        names = [f"{i // runs}-made-up-" for i in range(num_rows)]
        rows = [name.ljust(column.maximum or 0, "x")[: column.maximum].encode() for name in names]
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        return PackedColumn(np.frombuffer(b"".join(rows), np.uint8), offsets, is_text=True)
    if column.kind == "ragged":
        length = column.maximum or 0
        offsets = (np.arange(num_rows + 1) * length).astype(np.int32)
        values = _values(column, (num_rows * length,), rng)
        if length and values.dtype.kind != "f":
            values[offsets[:-1]] = 1
        return PackedColumn(values, offsets)
    shape = (num_rows, column.width) if column.kind == "vector" else (num_rows,)
    return PackedColumn(_values(column, shape, rng))


def _values(column: Column, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if np.dtype(column.dtype).kind == "f":
        return (0.01 + 0.98 * rng.random(shape, np.float32)).astype(column.dtype)
    return rng.integers(0, 2, shape, np.uint8).astype(column.dtype)

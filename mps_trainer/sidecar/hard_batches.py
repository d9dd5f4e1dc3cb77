"""Batches that a task must take in probation: sequences of every length, and values beyond what it may expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from mps_trainer.columns import IDENTITY_COLUMNS, Array, Column, PackedBatch, PackedColumn
from mps_trainer.sidecar.worst_case import RUNS

#: fair: what every task must take. The others hold what a column's declaration does not rule out, but its source may.
Stretch = Literal["fair", "large numbers", "large whole numbers"]

_IDENTITY = frozenset(column.name for column in IDENTITY_COLUMNS)
_LARGE = (0.0, 1.0, -1.0, 1e4, -1e4)
#: Above the ids of today's vocabularies.
_LARGE_WHOLE = 200_000
_CHARACTERS = "ab é€ 語\n"


def hard_batch(
    columns: Sequence[Column],
    num_rows: int,
    rng: np.random.Generator,
    *,
    length: int | None = None,
    stretch: Stretch = "fair",
) -> PackedBatch:
    """`num_rows` made-up experiences.

    Args:
        length: of every sequence, cut to the column's maximum; None mixes 0, 1, the maximum and random lengths.
        stretch: fair values are 0 and 1 for whole numbers and rewards, and within [0.01, 0.99] for other floats.
    """
    packed = {column.name: _column(column, num_rows, rng, length, stretch) for column in columns}
    return PackedBatch(packed, num_rows)


def _column(
    column: Column, num_rows: int, rng: np.random.Generator, length: int | None, stretch: Stretch
) -> PackedColumn:
    if column.kind == "text":
        rows = _texts(column, num_rows, rng, length)
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        return PackedColumn(np.frombuffer(b"".join(rows), np.uint8), offsets, is_text=True)
    if column.kind == "ragged":
        offsets = np.cumsum([0, *_lengths(column, num_rows, rng, length)]).astype(np.int32)
        return PackedColumn(_values(column, (int(offsets[-1]),), rng, stretch), offsets)
    shape = (num_rows, column.width) if column.kind == "vector" else (num_rows,)
    return PackedColumn(_values(column, shape, rng, stretch))


def _lengths(column: Column, num_rows: int, rng: np.random.Generator, length: int | None) -> list[int]:
    longest = column.maximum or 0
    if length is not None:
        return [min(length, longest)] * num_rows
    return [int(rng.choice((0, 1, longest, rng.integers(0, longest + 1)))) for _ in range(num_rows)]


def _texts(column: Column, num_rows: int, rng: np.random.Generator, length: int | None) -> list[bytes]:
    if column.name in _IDENTITY:
        runs = RUNS if column.name == "group" else 1
        return [f"made-up-{i // runs}".encode() for i in range(num_rows)]
    lengths = _lengths(column, num_rows, rng, length)
    return [(_CHARACTERS * num_bytes).encode()[:num_bytes] for num_bytes in lengths]


def _values(column: Column, shape: tuple[int, ...], rng: np.random.Generator, stretch: Stretch) -> Array:
    dtype = np.dtype(column.dtype)
    if dtype.kind == "f":
        if stretch == "large numbers":
            return rng.choice(_LARGE, shape).astype(dtype)
        if column.name == "reward":
            return rng.integers(0, 2, shape).astype(dtype)
        return (0.01 + 0.98 * rng.random(shape, np.float32)).astype(dtype)
    if stretch == "large whole numbers" and dtype.kind in "iu":
        return rng.choice((0, min(_LARGE_WHOLE, int(np.iinfo(dtype).max))), shape).astype(dtype)
    return rng.integers(0, 2, shape, np.uint8).astype(dtype)

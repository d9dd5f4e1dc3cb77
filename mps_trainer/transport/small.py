"""Batches of few rows, where Python's own steps cost more than the walk over the rows. One pass, no arrays on the way.

A large copy leaves the caches cold, and cold steps take five times as long: fewer of them help large rows as well.

    encode    the bytes that `Codec.measure` and `Codec.write` make, in pieces or joined; None for whatever they must
              look at themselves: too many rows, not contiguous, or wrong (they then say what)
    place     pieces into a slot
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import Any

import numpy as np

from mps_trainer.columns import Column, Rows
from mps_trainer.transport.arrow import ALIGNMENT, MAX_ELEMENTS, BatchLayout, Bytes, element_dtype

#: Up to here one copy of all pieces joined is faster than a copy for each.
MAX_BYTES = 32 * 2**10
#: Beyond, numpy walks over the rows faster than this does.
MAX_ROWS = 16
#: Shapes of batches whose metadata is kept; operators send few, or never the same one twice.
MAX_KNOWN = 256

_PADDING = tuple(bytes(n) for n in range(ALIGNMENT))
_OFFSETS = tuple(struct.Struct(f"<{n + 1}i") for n in range(MAX_ROWS + 1))


class SmallEncoder:
    """Encodes small batches of one list of columns. Thread-safe: what it keeps only ever saves work."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._plan = [_Plan(column, item_bytes) for column, item_bytes in layout.items()]
        self._metadata: dict[tuple[int, ...], bytes] = {}

    def encode(self, rows: Rows) -> tuple[int, int, bytes | list[Any]] | None:
        """(rows, bytes, message or its pieces), None when the batch is for `Codec`. Never raises on account of `rows`.

        Pieces are bytes and contiguous arrays, which belong to the caller until they are placed.
        """
        pieces: list[Any] = [b""]
        totals = []
        num_rows, nbytes = -1, self._layout.metadata_bytes
        for plan in self._plan:
            data = rows.get(plan.name)
            if data is None or (num_rows >= 0 and len(data) != num_rows):
                return None
            num_rows = len(data)
            if num_rows == 0:
                return None
            total = plan.take(data, num_rows, pieces)
            if not 0 <= total <= MAX_ELEMENTS:
                return None
            totals.append(total)
            size = total * plan.item_bytes
            padding = -size % ALIGNMENT
            nbytes += plan.offsets_bytes(num_rows) + size + padding
            pieces.append(_PADDING[padding])
        key = (num_rows, *totals)
        metadata = self._metadata.get(key)
        if metadata is None:
            metadata = self._layout.message(num_rows, totals).metadata
            if len(self._metadata) >= MAX_KNOWN:
                self._metadata.clear()
            self._metadata[key] = metadata
        pieces[0] = metadata
        if nbytes > MAX_BYTES:
            return num_rows, nbytes, pieces
        try:
            return num_rows, nbytes, b"".join(pieces)
        except (BufferError, TypeError, ValueError):
            # An array that is not contiguous.
            return None


def place(pieces: list[Any], out: Bytes) -> None:
    """Write the pieces to the beginning of `out`, one after the other. Large arrays are copied without the GIL."""
    at = 0
    for piece in pieces:
        if not len(piece):
            continue
        if type(piece) is bytes:
            end = at + len(piece)
            out[at:end] = np.frombuffer(piece, np.uint8)
        else:
            end = at + piece.nbytes
            np.copyto(out[at:end].view(piece.dtype).reshape(piece.shape), piece)
        at = end


class _Plan:
    """How one column is taken."""

    def __init__(self, column: Column, item_bytes: int) -> None:
        self.name = column.name
        self.item_bytes = item_bytes
        self._kind = column.kind
        self._dtype = element_dtype(column)
        self._maximum = column.maximum or 0
        self._has_offsets = column.kind in ("ragged", "text")
        self._width = column.width if column.kind == "vector" else 1

    def offsets_bytes(self, num_rows: int) -> int:
        """Bytes of the offsets, padding included."""
        return -(-4 * (num_rows + 1) // ALIGNMENT) * ALIGNMENT if self._has_offsets else 0

    def take(self, data: Any, num_rows: int, pieces: list[Any]) -> int:
        """Append the buffers of all rows, offsets first. Returns how many elements they have, -1 when it cannot."""
        if self._kind == "scalar" or (self._kind == "vector" and type(data) is np.ndarray):
            expected = (num_rows,) if self._kind == "scalar" else (num_rows, self._width)
            if type(data) is not np.ndarray or data.dtype != self._dtype or data.shape != expected:
                return -1
            pieces.append(data)
            return num_rows * self._width
        if num_rows > MAX_ROWS:
            return -1
        rows = self._texts(data) if self._kind == "text" else self._arrays(data)
        if rows is None:
            return -1
        lengths = list(map(len, rows))
        if self._kind == "vector":
            if lengths.count(self._width) != num_rows:
                return -1
        elif max(lengths) > self._maximum:
            return -1
        else:
            pieces += (
                _OFFSETS[num_rows].pack(0, *accumulate(lengths)), _PADDING[-4 * (num_rows + 1) % ALIGNMENT]
            )  # fmt: skip
        pieces += rows
        return sum(lengths)

    def _arrays(self, data: Any) -> list[Any] | None:
        rows = list(data)
        for row in rows:
            if type(row) is not np.ndarray or row.dtype != self._dtype or row.ndim != 1:
                return None
        return rows

    def _texts(self, data: Any) -> list[Any] | None:
        texts = list(data)
        if set(map(type, texts)) != {str}:
            return None
        return [text.encode("utf-8", "replace") for text in texts]

"""The metadata of an Arrow IPC record batch message, written by hand for a schema that both sides know.

For a fixed schema everything in the message's flatbuffer is constant but for a few 8-byte integers: the number of
rows, the lengths of the field nodes, the offsets and lengths of the buffers, the length of the body. So we keep a
template and fill in the integers, which takes microseconds and no library; any Arrow implementation can read the
result (the tests use pyarrow).

It also makes reading safe: from the number of rows and the length of each variable column the whole metadata
follows, and a message whose metadata is not exactly that is refused. No parser ever runs on bytes from outside.

    column   Arrow type              nodes           buffers (body)
    scalar   primitive               n               validity (empty), values
    vector   FixedSizeList[d]        n, n*d          validity (empty), validity (empty), values
    ragged   List                    n, total        validity (empty), offsets, validity (empty), values
    text     Utf8                    n               validity (empty), offsets, bytes
    bool travels as uint8, since Arrow packs its own bool into bits, which no tensor can view
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mps_trainer.columns import Column
from mps_trainer.transport.layout import round_up

ALIGNMENT = 64
#: int32 offsets and Arrow's 32-bit list lengths end here.
MAX_ELEMENTS = 2**31 - 1

Bytes = npt.NDArray[np.uint8]

# Indices of 8-byte words from the start of the message (prefix included).
_BODY_LENGTH, NUM_ROWS, _NODES = 5, 10, 12
_NODE_WORDS = {"scalar": 1, "vector": 2, "ragged": 2, "text": 1}
_BUFFERS = {"scalar": 2, "vector": 3, "ragged": 4, "text": 3}


class Span(NamedTuple):
    """Where the parts of one column stand in a message, in bytes from its start; `offsets_at` is -1 without offsets."""

    values_at: int
    values_bytes: int
    num_elements: int
    offsets_at: int


class Message(NamedTuple):
    """The metadata of one batch and the places of its columns."""

    metadata: bytes
    spans: tuple[Span, ...]
    nbytes: int


class BatchLayout:
    """Computes messages for one list of columns."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        self._item_bytes = [np.dtype("uint8" if c.dtype in ("bool", "text") else c.dtype).itemsize for c in columns]
        num_nodes = sum(_NODE_WORDS[c.kind] for c in columns)
        self._num_buffers = sum(_BUFFERS[c.kind] for c in columns)
        self._template = _template(num_nodes, self._num_buffers)
        self._buffers_at = _NODES + 2 * num_nodes + 1
        self.words = struct.Struct(f"<{len(self._template)}q")
        self.metadata_bytes = self.words.size

    @cached_property
    def variable(self) -> list[tuple[int, int, int]]:
        """(column, word that holds the byte length of its values, bytes per element) of ragged and text columns."""
        found, buffer = [], 0
        for position, column in enumerate(self.columns):
            buffer += _BUFFERS[column.kind]
            if column.kind in ("ragged", "text"):
                found.append((position, self._buffers_at + 2 * (buffer - 1) + 1, self._item_bytes[position]))
        return found

    def items(self) -> list[tuple[Column, int]]:
        """The columns, each with the bytes that one of its elements takes."""
        return list(zip(self.columns, self._item_bytes, strict=True))

    def message(self, num_rows: int, totals: Sequence[int]) -> Message:
        """The metadata for `num_rows` rows whose column i has `totals[i]` elements (only read for ragged and text)."""
        nodes: list[int] = []
        buffers: list[int] = []
        spans = []
        at = 0
        for column, item_bytes, total in zip(self.columns, self._item_bytes, totals, strict=True):
            kind, offsets_at = column.kind, -1
            nodes += (num_rows, 0)
            buffers += (at, 0)
            if kind in ("ragged", "text"):
                offsets_at, offsets_bytes = at, 4 * (num_rows + 1)
                buffers += (at, offsets_bytes)
                at = round_up(at + offsets_bytes, ALIGNMENT)
                count = total
            else:
                count = num_rows * (column.width if kind == "vector" else 1)
            if kind in ("ragged", "vector"):
                nodes += (count, 0)
                buffers += (at, 0)
            values_bytes = count * item_bytes
            buffers += (at, values_bytes)
            spans.append((at, values_bytes, count, offsets_at))
            at = round_up(at + values_bytes, ALIGNMENT)
        # Lists and one pack, no arrays: for a message of few rows this is a good part of all the work.
        words = self._template.copy()
        words[_BODY_LENGTH], words[NUM_ROWS] = at, num_rows
        words[_NODES : _NODES + len(nodes)] = nodes
        words[self._buffers_at : self._buffers_at + len(buffers)] = buffers
        base = self.metadata_bytes
        placed = tuple([Span(v + base, size, n, o + base if o >= 0 else -1) for v, size, n, o in spans])
        return Message(self.words.pack(*words), placed, base + at)

    def size(self, num_rows: int, totals: Sequence[int]) -> int:
        """Bytes of a message, without making it."""
        at = self.metadata_bytes
        for column, item_bytes, total in zip(self.columns, self._item_bytes, totals, strict=True):
            if column.kind in ("ragged", "text"):
                at += round_up(4 * (num_rows + 1), ALIGNMENT) + round_up(total * item_bytes, ALIGNMENT)
            else:
                count = num_rows * (column.width if column.kind == "vector" else 1)
                at += round_up(count * item_bytes, ALIGNMENT)
        return at

    @property
    def slack_bytes(self) -> int:
        """What a message takes beyond its rows: metadata, padding, and the one extra offset of a column."""
        return self.metadata_bytes + ALIGNMENT * self._num_buffers


def element_dtype(column: Column) -> np.dtype[Any]:
    """What one element of a column is in memory, in rows and in batches."""
    return np.dtype(np.uint8 if column.dtype == "text" else column.dtype)


def _template(num_nodes: int, num_buffers: int) -> list[int]:
    """The message with zeros for all integers that depend on the batch; padded so that the body is 64-byte aligned.

    The places are those of docs/wire_format.md; a flatbuffer reader finds the same through the two vtables.
    """
    flat = bytearray(96 + 16 * num_nodes + 16 * num_buffers)
    put = struct.pack_into
    put("<I", flat, 0, 24)  # root: the Message table
    put("<6H", flat, 8, 12, 20, 16, 18, 4, 8)  # its vtable: version, header type, header, body length
    put("<iIqhB", flat, 24, 24 - 8, 64 - 28, 0, 4, 3)  # version V5, header type RecordBatch
    put("<5H", flat, 48, 10, 20, 8, 4, 16)  # vtable of RecordBatch: length, nodes, buffers
    put("<iIqI", flat, 64, 64 - 48, 84 - 68, 0, 92 + 16 * num_nodes - 80)
    put("<I", flat, 84, num_nodes)
    put("<I", flat, 92 + 16 * num_nodes, num_buffers)
    padded = round_up(8 + len(flat), ALIGNMENT) - 8
    message = struct.pack("<Ii", 0xFFFFFFFF, padded) + bytes(flat).ljust(padded, b"\0")
    return list(struct.unpack(f"<{len(message) // 8}q", message))

"""Reads the bytes that `Codec.write` makes. They come from outside: nothing is believed that was not compared.

The metadata must be the only one possible for its numbers of rows and elements; offsets must divide the values; no
byte is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mps_trainer.columns import Array, Column, PackedBatch, PackedColumn
from mps_trainer.errors import CorruptRecordError
from mps_trainer.transport.arrow import MAX_ELEMENTS, NUM_ROWS, BatchLayout, Bytes, Message, element_dtype
from mps_trainer.transport.small import MAX_KNOWN, MAX_ROWS

_UINT8, _INT32 = np.dtype(np.uint8), np.dtype(np.int32)


class _Plan(NamedTuple):
    """How one column is read. `width` is 0 but for vectors."""

    name: str
    dtype: np.dtype[Any]
    width: int
    maximum: int | None
    is_bool: bool
    is_text: bool

    @classmethod
    def of(cls, column: Column) -> _Plan:
        width = column.width if column.kind == "vector" else 0
        is_bool, is_text = column.dtype == "bool", column.kind == "text"
        return cls(column.name, element_dtype(column), width, column.maximum, is_bool, is_text)


class Decoder:
    """Decodes batches of one list of columns. Thread-safe: what it keeps only ever saves work."""

    def __init__(self, columns: Sequence[Column], layout: BatchLayout) -> None:
        self._layout = layout
        self._plans = [_Plan.of(column) for column in columns]
        # Metadata of batches of few rows that was found to be right, byte for byte, and what it says.
        self._known: dict[bytes, tuple[int, Message]] = {}

    def decode(self, buffer: Any) -> PackedBatch:
        """See `Codec.decode`."""
        raw = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
        num_rows, message = self._checked_metadata(raw)
        columns = {}
        for plan, span in zip(self._plans, message.spans):  # noqa: B905  # both are made from the same columns
            values: Array = raw[span.values_at : span.values_at + span.values_bytes]
            if plan.dtype is not _UINT8:
                values = values.view(plan.dtype)
            if plan.is_bool and span.num_elements and values.view(_UINT8).max() > 1:
                raise CorruptRecordError(f"column {plan.name!r} holds bytes that are no bool")
            if plan.width:
                values = values.reshape(num_rows, plan.width)
            offsets = None
            if span.offsets_at >= 0:
                offsets = raw[span.offsets_at : span.offsets_at + 4 * (num_rows + 1)].view(_INT32)
                _check_offsets(plan, offsets, span.num_elements)
            columns[plan.name] = PackedColumn(values, offsets, plan.is_text)
        return PackedBatch(columns, num_rows)

    def _checked_metadata(self, raw: Bytes) -> tuple[int, Message]:
        """(rows, message) of a batch whose metadata is exactly what its columns make. Raises CorruptRecordError."""
        head = self._layout.metadata_bytes
        if raw.nbytes < head:
            raise CorruptRecordError(f"a batch of {raw.nbytes} bytes is shorter than its metadata ({head})")
        # A copy, since what is checked must not change before it is used.
        metadata = raw[:head].tobytes()
        if (known := self._known.get(metadata)) is not None and known[1].nbytes == raw.nbytes:
            return known
        words = self._layout.words.unpack(metadata)
        message = self._expected(words)
        if message is None or message.nbytes != raw.nbytes or message.metadata != metadata:
            raise CorruptRecordError(
                "the metadata of the batch is not what its columns make", "check that both sides run the same version"
            )
        checked = words[NUM_ROWS], message
        if checked[0] <= MAX_ROWS:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[metadata] = checked
        return checked

    def _expected(self, words: Sequence[int]) -> Message | None:
        num_rows = words[NUM_ROWS]
        if not 0 <= num_rows <= MAX_ELEMENTS:
            return None
        totals = [0] * len(self._plans)
        for position, word, item_bytes in self._layout.variable:
            totals[position] = words[word] // item_bytes
            if not 0 <= totals[position] <= MAX_ELEMENTS:
                return None
        # Not the message itself before its size is known to be sane: the numbers are from outside.
        if self._layout.size(num_rows, totals) >= 2**62:
            return None
        return self._layout.message(num_rows, totals)


def _check_offsets(plan: _Plan, offsets: npt.NDArray[np.int32], count: int) -> None:
    # Each offset is compared, not only its difference to the last: of int32 that can wrap around and look harmless.
    if len(offsets) <= MAX_ROWS + 1:
        ends = offsets.tolist()
        if ends == [0, count] and (plan.maximum is None or count <= plan.maximum):
            return
        lengths = list(map(operator.sub, ends[1:], ends))
        divides = ends[0] == 0 and ends[-1] == count and (not lengths or min(lengths) >= 0)
        longest = max(lengths) if lengths else 0
    else:
        divides = offsets[0] == 0 and offsets[-1] == count and bool((offsets[1:] >= offsets[:-1]).all())
        longest = int(np.diff(offsets).max()) if divides else 0
    if not divides:
        raise CorruptRecordError(f"the offsets of column {plan.name!r} do not divide its {count} elements")
    if plan.maximum is not None and longest > plan.maximum:
        raise CorruptRecordError(f"a row of column {plan.name!r} is longer than its maximum {plan.maximum}")

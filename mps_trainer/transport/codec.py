"""Rows to bytes and back: one Arrow record batch message, written straight into its place, read without copying.

measure(rows)   checks the rows once and learns their sizes  -> Measured
split           row ranges that each fit a slot
write           np.concatenate(..., out=view of the slot): one pass over the data, with the GIL released
decode          metadata compared with the only one possible, offsets checked; arrays are views of the buffer
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mps_trainer.columns import Array, Column, PackedBatch, Rows
from mps_trainer.errors import ExperienceError, TransportError
from mps_trainer.transport.arrow import MAX_ELEMENTS, BatchLayout, Bytes, Message, element_dtype
from mps_trainer.transport.decoder import Decoder

Ends = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Prepared:
    """One column, checked. `ends` has n + 1 element counts, `data` is one array, a list of arrays, or joined text."""

    data: Array | Sequence[Array]
    ends: Ends | None


@dataclass(frozen=True)
class Measured:
    """Rows that passed the checks, and how large they are."""

    num_rows: int
    prepared: tuple[_Prepared, ...]

    def totals(self, start: int, stop: int) -> list[int]:
        """Elements of rows start..stop of each column, 0 for columns of fixed width."""
        return [0 if p.ends is None else int(p.ends[stop] - p.ends[start]) for p in self.prepared]


class Codec:
    """Encodes and decodes batches of one list of columns. Thread-safe: what it keeps only ever saves work."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        self.layout = BatchLayout(columns)
        self._decoder = Decoder(self.columns, self.layout)

    def measure(self, rows: Rows) -> Measured:
        """Check `rows` against the columns.

        Raises ExperienceError naming the column that is missing, has another type, width or number of rows, or
        a row longer than its maximum.
        """
        prepared = []
        num_rows = -1
        for column in self.columns:
            if column.name not in rows:
                raise ExperienceError(f"the rows lack column {column.name!r}", f"they have {sorted(rows)}")
            data = rows[column.name]
            if num_rows < 0:
                num_rows = len(data)
            if len(data) != num_rows:
                raise ExperienceError(f"column {column.name!r} has {len(data)} rows, others have {num_rows}")
            prepared.append(_prepare(column, data))
        return Measured(num_rows, tuple(prepared))

    def split(self, measured: Measured, capacity: int, max_rows: int = MAX_ELEMENTS) -> list[tuple[int, int]]:
        """Ranges of rows whose messages fit `capacity` bytes, in order, as few as a greedy walk makes.

        Raises TransportError, naming `ring_slot`, when a single row does not fit.
        """
        n = measured.num_rows
        if n <= max_rows and self.layout.size(n, measured.totals(0, n)) <= capacity:
            return [(0, n)]
        cumulated = np.zeros(n + 1, np.int64)
        for column, part in zip(self.columns, measured.prepared, strict=True):
            cumulated += _row_bytes(column, part, n)
        budget = capacity - self.layout.slack_bytes
        ranges, start = [], 0
        while start < n:
            stop = int(np.searchsorted(cumulated, cumulated[start] + budget, "right")) - 1
            stop = min(max(stop, start + 1), start + max_rows)
            needed = self.layout.size(stop - start, measured.totals(start, stop))
            if needed > capacity:
                raise TransportError(
                    f"row {start} takes {needed} bytes, a slot holds {capacity}",
                    "raise ring_slot, or lower the maximum of the task's longest column",
                )
            ranges.append((start, stop))
            start = stop
        return ranges

    def message(self, measured: Measured, start: int, stop: int) -> Message:
        """The metadata for rows start..stop. Raises TransportError where 32-bit offsets cannot reach."""
        totals = measured.totals(start, stop)
        if max(totals) > MAX_ELEMENTS:
            raise TransportError(f"a column of {max(totals)} elements in one record", "lower ring_slot below 2 GiB")
        return self.layout.message(stop - start, totals)

    def write(self, measured: Measured, start: int, stop: int, message: Message, out: Bytes) -> None:
        """Write rows start..stop as `message` to the beginning of `out`, every byte of it, padding included.

        `out` must be at least `message.nbytes` long. Raises ExperienceError when a row has another type than
        its column.
        """
        head = self.layout.metadata_bytes
        out[:head] = np.frombuffer(message.metadata, np.uint8)
        end = head
        for column, part, span in zip(self.columns, measured.prepared, message.spans, strict=True):
            if part.ends is not None:
                offsets_end = span.offsets_at + 4 * (stop - start + 1)
                np.subtract(
                    part.ends[start : stop + 1],
                    part.ends[start],
                    out=out[span.offsets_at : offsets_end].view(np.int32),
                    casting="unsafe",
                )
                out[end : span.offsets_at] = 0
                end = offsets_end
            out[end : span.values_at] = 0
            end = span.values_at + span.values_bytes
            _write_values(column, part, start, stop, out[span.values_at : end].view(element_dtype(column)))
        out[end : message.nbytes] = 0

    def decode(self, buffer: Any) -> PackedBatch:
        """Views of a message: no bytes are copied, the arrays are as read-only as `buffer` is.

        `buffer` is bytes, a memoryview or a uint8 array whose memory is 64-byte aligned for aligned columns.
        Raises CorruptRecordError for anything that `write` would not have written for some rows.
        """
        return self._decoder.decode(buffer)


def encode_batch(rows: Rows, columns: Sequence[Column]) -> bytes:
    """`rows` as one Arrow IPC record batch message. The same bytes as in a slot."""
    codec = Codec(columns)
    measured = codec.measure(rows)
    message = codec.message(measured, 0, measured.num_rows)
    out = np.empty(message.nbytes, np.uint8)
    codec.write(measured, 0, measured.num_rows, message, out)
    return out.tobytes()


def decode_batch(buffer: Any, columns: Sequence[Column]) -> PackedBatch:
    """Views of `buffer`, which must hold exactly one message. Raises CorruptRecordError."""
    return Codec(columns).decode(buffer)


def _prepare(column: Column, data: Any) -> _Prepared:
    if column.kind == "text":
        return _prepare_text(column, cast("Sequence[str]", data))
    if column.kind == "ragged":
        data = _checked_rows(column, data)
        return _Prepared(data, _ends(column, map(len, data), len(data)))
    if isinstance(data, np.ndarray):
        expected = (len(data), column.width) if column.kind == "vector" else (len(data),)
        if data.shape != expected or data.dtype != element_dtype(column):
            raise _mismatch(column, f"{data.dtype}{list(data.shape)}", f"{column.dtype}{list(expected)}")
        return _Prepared(data, None)
    if column.kind == "scalar":
        try:
            return _Prepared(np.asarray(data, element_dtype(column)).reshape(len(data)), None)
        except (TypeError, ValueError) as error:
            raise _mismatch(column, str(error), f"one {column.dtype} a row") from error
    data = _checked_rows(column, data)
    for row in data:
        if len(row) != column.width:
            raise _mismatch(column, f"a vector of {len(row)}", f"a width of {column.width}")
    return _Prepared(data, None)


def _checked_rows(column: Column, data: Any) -> list[Array]:
    # All rows, before the first part of a split batch is sent: half a batch is worse than none.
    rows = list(data)
    kinds = {(row.dtype, row.ndim) if isinstance(row, np.ndarray) else (type(row).__name__, 1) for row in rows}
    if kinds - {(element_dtype(column), 1)}:
        raise _mismatch(column, ", ".join(sorted(f"{t}[{n}d]" for t, n in kinds)), f"one-dimensional {column.dtype}")
    return rows


def _prepare_text(column: Column, texts: Sequence[str]) -> _Prepared:
    try:
        joined = "".join(texts)
    except TypeError as error:
        raise _mismatch(column, str(error), "one str a row") from error
    if joined.isascii():
        blob, lengths = joined.encode("ascii"), map(len, texts)
    else:
        encoded = [text.encode("utf-8", "replace") for text in texts]
        blob, lengths = b"".join(encoded), map(len, encoded)
    return _Prepared(np.frombuffer(blob, np.uint8), _ends(column, lengths, len(texts)))


def _ends(column: Column, lengths: Iterable[int], num_rows: int) -> Ends:
    ends = np.zeros(num_rows + 1, np.int64)
    counts = np.fromiter(lengths, np.int64, num_rows)
    np.cumsum(counts, out=ends[1:])
    if num_rows and column.maximum is not None and counts.max() > column.maximum:
        raise _mismatch(column, f"a row of {counts.max()}", f"at most {column.maximum}")
    return ends


def _mismatch(column: Column, found: str, needed: str) -> ExperienceError:
    return ExperienceError(
        f"column {column.name!r} got {found}, needs {needed}", "correct the task's Column or its data"
    )


def _row_bytes(column: Column, part: _Prepared, num_rows: int) -> Ends:
    item_bytes = element_dtype(column).itemsize
    if part.ends is not None:
        return part.ends * item_bytes + 4 * np.arange(num_rows + 1)
    per_row = item_bytes * (column.width if column.kind == "vector" else 1)
    return per_row * np.arange(num_rows + 1)


def _write_values(column: Column, part: _Prepared, start: int, stop: int, out: Array) -> None:
    if isinstance(part.data, np.ndarray):
        if part.ends is not None:
            out[:] = part.data[part.ends[start] : part.ends[stop]]
        else:
            out[:] = part.data[start:stop].reshape(-1)
        return
    if stop == start:
        return
    try:
        np.concatenate(part.data[start:stop], out=out, casting="equiv")
    except (TypeError, ValueError) as error:
        found = sorted({f"{np.asarray(row).dtype}[{np.asarray(row).ndim}d]" for row in part.data[start:stop]})
        raise _mismatch(column, ", ".join(found), f"one-dimensional {column.dtype}") from error

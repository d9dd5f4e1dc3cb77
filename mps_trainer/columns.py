"""Columns: what of an experience travels to the sidecar, in which type and shape.

A task declares `Column`s. Beside the operator they select and check the data (`operator/extract.py`); the
transport turns them into an Arrow schema; the sidecar gets them back as a `PackedBatch`. Numpy only: this
module is loaded in Trinity's actor and must stay light.

    Column  --extract-->  Rows (one array a row)  --encode into the ring-->  PackedBatch (views of the ring)

Maker and eater: `Rows` are made by the operator and eaten by the transport's encoder. A `PackedBatch` is made
by the transport's decoder and eaten by the sidecar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mps_trainer.errors import ConfigError

Kind = Literal["scalar", "vector", "ragged", "text"]
Array: TypeAlias = npt.NDArray[Any]

DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")

#: scalar: array of shape (n,); vector: n arrays of shape (d,) or one of shape (n, d);
#: ragged: n arrays of shape (length_i,); text: n strings.
Rows: TypeAlias = Mapping[str, "Array | Sequence[Array] | Sequence[str]"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One thing that the task needs from every experience.

    Attributes:
        name: the key under which the task finds it in its batch; lower case, at most 32 characters.
        source: where it stands in an experience: a field ("reward", "logprobs", "response_tokens"),
            or a key of its info or metrics ("info.hidden_state", "metrics.accuracy").
        dtype: a numpy dtype name of `DTYPES`, or "text".
        shape: () for one number, (d,) for a vector of width d, (None,) for a sequence of any length.
        maximum: the longest sequence kept, in elements (UTF-8 bytes for text); needed where the length varies.
            A longer sequence is cut to `maximum` elements and counted.
        keep: which elements of a longer sequence are kept: the first or the last ones.
        required: False lets an experience go without; the value is then zeros (empty for a sequence).
    """

    name: str
    source: str
    dtype: str = "float32"
    shape: tuple[int | None, ...] = ()
    maximum: int | None = None
    keep: Literal["first", "last"] = "first"
    required: bool = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"column name {self.name!r}", "use a-z, 0-9 and _, at most 32 characters")
        if self.dtype != "text" and self.dtype not in DTYPES:
            raise ConfigError(f"column {self.name!r} has dtype {self.dtype!r}", f"use one of {', '.join(DTYPES)}, text")
        if len(self.shape) > 1 or (self.dtype == "text" and self.shape):
            raise ConfigError(
                f"column {self.name!r} has shape {self.shape}",
                "use () for a number or text, (d,) for a vector, (None,) for a sequence",
            )
        if self.keep not in ("first", "last"):
            raise ConfigError(f"column {self.name!r} has keep {self.keep!r}", "use first or last")
        if self.kind in ("ragged", "text") and not self.maximum:
            raise ConfigError(
                f"column {self.name!r} has no maximum",
                "set maximum=, the longest sequence to keep: memory is planned from it",
            )

    @property
    def kind(self) -> Kind:
        """How rows of this column are laid out."""
        if self.dtype == "text":
            return "text"
        if not self.shape:
            return "scalar"
        return "ragged" if self.shape[0] is None else "vector"

    @property
    def width(self) -> int:
        """The width of a vector column."""
        assert self.shape, f"{self.name} is no vector"
        assert self.shape[0] is not None, f"{self.name} is no vector"
        return self.shape[0]

    @property
    def max_row_bytes(self) -> int:
        """The most bytes that one row can take on the wire, offsets included."""
        if self.kind == "text":
            return (self.maximum or 0) + 4
        item = np.dtype(self.dtype).itemsize
        if self.kind == "ragged":
            return (self.maximum or 0) * item + 4
        return item * (self.width if self.kind == "vector" else 1)


#: Sent with every experience, whatever the task: they name it and say which task's runs it belongs to.
IDENTITY_COLUMNS = (
    Column(name="eid", source="eid.uid", dtype="text", maximum=200),
    Column(name="group", source="eid.tid", dtype="text", maximum=160),
    Column(name="reward", source="reward", dtype="float32", required=False),
)


@dataclass(frozen=True)
class PackedColumn:
    """A column of n rows without gaps.

    Attributes:
        values: scalar (n,); vector (n, d); ragged (total,); text uint8 (total_bytes,).
        offsets: int32 (n + 1,) where row i is values[offsets[i]:offsets[i + 1]]; None for scalar and vector.
        is_text: the values are the bytes of UTF-8 strings.
    """

    values: Array
    offsets: Array | None = None
    is_text: bool = False

    def row(self, i: int) -> Array:
        """Row i: a scalar array, a (d,) vector or a (length_i,) sequence."""
        if self.offsets is None:
            return np.asarray(self.values[i])
        return np.asarray(self.values[self.offsets[i] : self.offsets[i + 1]])

    def text(self, i: int) -> str:
        """Row i of a text column, invalid UTF-8 replaced."""
        return self.row(i).tobytes().decode("utf-8", "replace")

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets."""
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)


@dataclass(frozen=True)
class PackedBatch:
    """Rows of several columns. The arrays may be views of shared memory: see `transport.Delivery`."""

    columns: Mapping[str, PackedColumn]
    num_rows: int

    def __getitem__(self, name: str) -> PackedColumn:
        return self.columns[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self.columns.values())

"""The replay buffer: the experiences that training draws from, in memory of our own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mps_trainer.columns import Array, Column, PackedBatch, PackedColumn

_EID = "eid"

#: Where a draw goes: (shape, dtype) -> an array that nobody else uses. `np.empty` is one.
Empty: TypeAlias = "Callable[[tuple[int, ...], np.dtype[Any]], Array]"


class ReplayBuffer:
    """The last `capacity` experiences: first in, first out; drawn uniformly, without repetition inside a batch.

    Rows are copies, never views of the ring. An experience whose id is held, or left not long ago (the last
    2 * capacity ids are remembered), is skipped: delivery is at least once. Scalars and vectors stand in one
    array of (capacity, ...), which the system backs with memory as it fills; sequences are one array a row.

    A draw depends only on the seed, the number of draws before it and the experiences held, oldest first; not on
    where they happen to stand. So a buffer that was saved and loaded goes on as if nothing had happened.
    """

    def __init__(self, columns: Sequence[Column], capacity: int, seed: int) -> None:
        self.capacity = capacity
        self._columns = {column.name: column for column in columns}
        self._store: dict[str, Array] = {}
        for column in columns:
            if column.kind in ("ragged", "text"):
                self._store[column.name] = np.empty(capacity, object)
            else:
                shape = (capacity, column.width) if column.kind == "vector" else (capacity,)
                self._store[column.name] = np.empty(shape, column.dtype)
        self._first = 0
        self._size = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held."""
        total = 0
        for values in self._store.values():
            if values.dtype == object:
                total += sum(row.nbytes for row in values if row is not None)
            else:
                total += values.nbytes // self.capacity * self._size
        return total

    def add(self, batch: PackedBatch) -> int:
        """Copy the rows that are new; the number of them."""
        fresh = []
        for i in range(batch.num_rows):
            eid = batch[_EID].row(i).tobytes()
            if eid not in self._known:
                self._known[eid] = None
                fresh.append(i)
        while len(self._known) > 2 * self.capacity:
            self._known.popitem(last=False)
        self._append(batch, fresh[-self.capacity :])
        return len(fresh)

    def sample(self, num_rows: int, empty: Empty = np.empty) -> PackedBatch:
        """`num_rows` experiences, or all that there are when they are fewer, in random order, in memory of `empty`."""
        places = self._rng.choice(self._size, min(num_rows, self._size), replace=False)
        return self._gather((self._first + places) % self.capacity, empty)

    def remove(self, eids: Collection[bytes]) -> PackedBatch:
        """Take out the experiences with these ids, in order; they stay known, so that none comes in again."""
        wanted = set(eids)
        order = (self._first + np.arange(self._size)) % self.capacity
        chosen = np.array([self._store[_EID][place].tobytes() in wanted for place in order], bool)
        removed, kept = self._gather(order[chosen]), self._gather(order[~chosen])
        if removed.num_rows:
            self._first = self._size = 0
            self._append(kept, range(kept.num_rows))
        return removed

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Everything, as arrays and as plain JSON values: see `load_state`."""
        rows = self._gather((self._first + np.arange(self._size)) % self.capacity)
        arrays: dict[str, Array] = {}
        for name, column in rows.columns.items():
            arrays[f"{name}.values"] = np.ascontiguousarray(column.values)
            if column.offsets is not None:
                arrays[f"{name}.offsets"] = column.offsets
        known = [np.frombuffer(eid, np.uint8) for eid in self._known]
        arrays["known.values"], arrays["known.offsets"] = _concatenate(known, np.dtype(np.uint8))
        return arrays, {"num_rows": self._size, "rng": self._rng.bit_generator.state}

    def load_state(self, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        columns = {
            name: PackedColumn(arrays[f"{name}.values"], arrays.get(f"{name}.offsets"), column.kind == "text")
            for name, column in self._columns.items()
        }
        self._first = self._size = 0
        self._append(PackedBatch(columns, state["num_rows"]), range(state["num_rows"]))
        known = PackedColumn(arrays["known.values"], arrays["known.offsets"])
        assert known.offsets is not None
        self._known = OrderedDict((known.row(i).tobytes(), None) for i in range(len(known.offsets) - 1))
        self._rng.bit_generator.state = state["rng"]

    def _append(self, batch: PackedBatch, rows: Sequence[int]) -> None:
        places = (self._first + self._size + np.arange(len(rows))) % self.capacity
        for name, store in self._store.items():
            column = batch[name]
            if store.dtype == object:
                for place, i in zip(places, rows, strict=True):
                    store[place] = column.row(i).copy()
            else:
                store[places] = column.values[list(rows)]
        overflow = max(0, self._size + len(rows) - self.capacity)
        self._first = (self._first + overflow) % self.capacity
        self._size = min(self.capacity, self._size + len(rows))

    def _gather(self, places: Array, empty: Empty = np.empty) -> PackedBatch:
        columns = {}
        for name, store in self._store.items():
            if store.dtype == object:
                column = self._columns[name]
                dtype = np.dtype(np.uint8 if column.kind == "text" else column.dtype)
                columns[name] = PackedColumn(*_concatenate(list(store[places]), dtype, empty), column.kind == "text")
            else:
                values = empty((len(places), *store.shape[1:]), store.dtype)
                # The places are in range by construction, and any mode but "raise" spares a buffer in between.
                np.take(store, places, axis=0, out=values, mode="clip")
                columns[name] = PackedColumn(values)
        return PackedBatch(columns, len(places))


def _concatenate(rows: list[Array], dtype: np.dtype[Any], empty: Empty = np.empty) -> tuple[Array, Array]:
    offsets = empty((len(rows) + 1,), np.dtype(np.int32))
    offsets[0] = 0
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = empty((int(offsets[-1]),), dtype)
    if rows:
        np.concatenate(rows, out=values)
    return values, offsets

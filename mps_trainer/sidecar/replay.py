"""The replay buffer: the experiences that training draws from, in memory of our own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mps_trainer.columns import Array, Column, PackedBatch, PackedColumn
from mps_trainer.config import ReplaySettings
from mps_trainer.sidecar.row_bytes import held_row_bytes, smallest_row_bytes
from mps_trainer.sidecar.sampling import Sampler

_EID = "eid"

#: Where a draw goes: (shape, dtype) -> an array that nobody else uses. `np.empty` is one.
Empty: TypeAlias = "Callable[[tuple[int, ...], np.dtype[Any]], Array]"


@dataclass(frozen=True)
class Draw:
    """Experiences for one training step.

    Attributes:
        places: (n,) where they stand; valid until the buffer changes.
        weights: (n,) float32 importance weights; None but for `sampling: priority`.
    """

    rows: PackedBatch
    places: Array
    weights: Array | None = None


class ReplayBuffer:
    """The last `capacity` experiences, or `max_bytes` of them: first in, first out; drawn as `settings` say.

    Rows are copies, never views of the ring. An experience whose id is held, or left not long ago (the last
    2 * capacity ids are remembered), is skipped: delivery is at least once. Scalars and vectors stand in one
    array of (capacity, ...), which the system backs with memory as it fills; sequences are one array a row.

    A draw depends only on the seed, the number of draws before it and the experiences held, oldest first, with their
    losses and classes; not on where they happen to stand. So a buffer that was saved and loaded goes on as if nothing
    had happened.

    With `max_bytes` there are never more places than the smallest rows would need: a place that was used once keeps
    its memory for scalars and vectors.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        capacity: int,
        seed: int,
        max_bytes: int | None = None,
        settings: ReplaySettings | None = None,
    ) -> None:
        if max_bytes is not None:
            capacity = max(1, min(capacity, max_bytes // smallest_row_bytes(columns)))
        self.capacity = capacity
        self.settings = settings or ReplaySettings()
        self._max_bytes = max_bytes
        self._columns = {column.name: column for column in columns}
        self._store: dict[str, Array] = {}
        for column in columns:
            if column.kind in ("ragged", "text"):
                self._store[column.name] = np.empty(capacity, object)
            else:
                shape = (capacity, column.width) if column.kind == "vector" else (capacity,)
                self._store[column.name] = np.empty(shape, column.dtype)
        # Of each row: its number since the run began, how often it was drawn, its bytes.
        self._tags = {name: np.zeros(capacity, np.int64) for name in ("number", "draws", "bytes")}
        if self.settings.sampling == "priority":
            self._tags["priority"] = np.zeros(capacity, np.float64)
        if self.settings.class_balance:
            self._tags["class"] = np.zeros(capacity, np.uint8)
        self._first = 0
        self._size = 0
        self._nbytes = 0
        self._draws = 0
        self.added = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._barred: Collection[bytes] = frozenset()
        self._on_barred: Callable[[PackedBatch, list[int]], object] = lambda *_: None
        self._sampler = Sampler(self.settings, capacity)
        self._rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held, with what numpy needs for each sequence."""
        return self._nbytes

    @property
    def mean_draws(self) -> float:
        """How often the experiences held were drawn, on average."""
        return self._draws / self._size if self._size else 0.0

    def add(self, batch: PackedBatch, classes: Array | None = None) -> int:
        """Copy the rows that are new; the number of them, those counted that are barred and not copied.

        Args:
            classes: (n,) uint8, the class of each row; needed for `class_balance`.
        """
        fresh: list[int] = []
        barred: list[int] = []
        for i in range(batch.num_rows):
            eid = batch[_EID].row(i).tobytes()
            if eid not in self._known:
                self._known[eid] = None
                # A look into a set, some 30 ns a row: nothing of the intake waits for it.
                (barred if eid in self._barred else fresh).append(i)
        while len(self._known) > 2 * self.capacity:
            self._known.popitem(last=False)
        tags = {"number": self.added + np.arange(len(fresh)), "draws": np.zeros(len(fresh), np.int64)}
        self.added += len(fresh)
        if "priority" in self._tags:
            # As urgent as the most urgent, so that each is seen once soon.
            most = self._aged("priority").max() if self._size else 1.0
            tags["priority"] = np.full(len(fresh), most)
        if "class" in self._tags:
            assert classes is not None
            tags["class"] = classes[fresh]
        self._append(batch, np.array(fresh, np.int64), tags)
        if barred:
            self._on_barred(batch, barred)
        return len(fresh) + len(barred)

    def bar(self, eids: Collection[bytes], on_barred: Callable[[PackedBatch, list[int]], object]) -> None:
        """Keep experiences with these ids out from now on, so that none takes the place of another.

        Args:
            on_barred: called with a batch and the places in it of those that were kept out.
        """
        self._barred, self._on_barred = eids, on_barred

    def draw(self, num_rows: int, empty: Empty = np.empty) -> Draw:
        """`num_rows` experiences, or as many as there are when they are fewer, in memory of `empty`."""
        priorities = self._aged("priority") if "priority" in self._tags else None
        classes = self._aged("class") if "class" in self._tags else None
        ages, weights = self._sampler.draw(self._rng, self._size, min(num_rows, self._size), priorities, classes)
        return self._take(ages, empty, weights)

    def sample(self, num_rows: int, empty: Empty = np.empty) -> PackedBatch:
        """The rows of a `draw`."""
        return self.draw(num_rows, empty).rows

    def numbers_from(self, number: int) -> Array:
        """(n,) int64: the numbers of the experiences held that came in `number`-th or later, in order."""
        numbers = self._aged("number")
        return numbers[np.searchsorted(numbers, number) :]

    def shuffled(self, numbers: Array) -> Array:
        """The same in random order."""
        return self._rng.permutation(numbers)

    def pick(self, numbers: Array, empty: Empty = np.empty) -> Draw:
        """The experiences with these numbers, in this order, without those that have left."""
        held = self._aged("number")
        ages = np.searchsorted(held, numbers)
        return self._take(ages[np.isin(numbers, held)], empty, None)

    def learnt(self, draw: Draw, losses: Array) -> None:
        """Note (n,) losses of the experiences of the last draw, for `sampling: priority`."""
        self._tags["priority"][draw.places] = self._sampler.priority(losses)

    def held(self, eids: Collection[bytes], number: int = 0) -> list[bytes]:
        """Which of these ids the experiences have that came in `number`-th or later and are held, the oldest first."""
        fresh = self._order()[self._size - len(self.numbers_from(number)) :]
        return [eid for place in fresh if (eid := self._store[_EID][place].tobytes()) in eids]

    def remove(self, eids: Collection[bytes]) -> PackedBatch:
        """Take out the experiences with these ids, in order; they stay known, so that none comes in again."""
        wanted = set(eids)
        order = self._order()
        chosen = np.array([self._store[_EID][place].tobytes() in wanted for place in order], bool)
        removed, kept = self._gather(order[chosen]), self._gather(order[~chosen])
        if removed.num_rows:
            tags = {name: values[order[~chosen]] for name, values in self._tags.items()}
            self._evict(self._size)
            self._append(kept, np.arange(kept.num_rows), tags)
        return removed

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Everything, as arrays and as plain JSON values: see `load_state`."""
        rows = self._gather(self._order())
        arrays: dict[str, Array] = {f"tag.{name}": self._aged(name) for name in self._tags}
        for name, column in rows.columns.items():
            arrays[f"{name}.values"] = np.ascontiguousarray(column.values)
            if column.offsets is not None:
                arrays[f"{name}.offsets"] = column.offsets
        known = [np.frombuffer(eid, np.uint8) for eid in self._known]
        arrays["known.values"], arrays["known.offsets"] = _concatenate(known, np.dtype(np.uint8))
        return arrays, {"num_rows": self._size, "added": self.added, "rng": self._rng.bit_generator.state}

    def load_state(self, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        columns = {
            name: PackedColumn(arrays[f"{name}.values"], arrays.get(f"{name}.offsets"), column.kind == "text")
            for name, column in self._columns.items()
        }
        self._evict(self._size)
        tags = {name: arrays[f"tag.{name}"] for name in self._tags}
        self._append(PackedBatch(columns, state["num_rows"]), np.arange(state["num_rows"]), tags)
        self.added = state["added"]
        known = PackedColumn(arrays["known.values"], arrays["known.offsets"])
        assert known.offsets is not None
        self._known = OrderedDict((known.row(i).tobytes(), None) for i in range(len(known.offsets) - 1))
        self._rng.bit_generator.state = state["rng"]

    def _order(self) -> Array:
        return (self._first + np.arange(self._size)) % self.capacity

    def _aged(self, tag: str) -> Array:
        """A tag of all rows held, the oldest first."""
        values, end = self._tags[tag], self._first + self._size
        if end <= self.capacity:
            return values[self._first : end]
        return np.concatenate([values[self._first :], values[: end - self.capacity]])

    def _append(self, batch: PackedBatch, rows: Array, tags: Mapping[str, Array]) -> None:
        sizes = held_row_bytes(batch, rows)
        fitting = np.arange(len(rows)) >= len(rows) - self.capacity
        if self._max_bytes is not None:
            # The newest that fit; at the start it was made sure that some do.
            fitting &= np.cumsum(sizes[::-1])[::-1] <= self._max_bytes
        rows, sizes = rows[fitting], sizes[fitting]
        self._evict(max(self._size + len(rows) - self.capacity, self._too_many_bytes(int(sizes.sum()))))
        places = (self._first + self._size + np.arange(len(rows))) % self.capacity
        for name, store in self._store.items():
            column = batch[name]
            if store.dtype == object:
                for place, i in zip(places, rows, strict=True):
                    store[place] = column.row(i).copy()
            else:
                store[places] = column.values[rows]
        for name, values in {**tags, "bytes": sizes}.items():
            self._tags[name][places] = values if name == "bytes" else values[fitting]
        self._size += len(rows)
        self._nbytes += int(sizes.sum())
        self._draws += int(self._tags["draws"][places].sum())
        self._sampler.changed()

    def _too_many_bytes(self, coming: int) -> int:
        """How many of the oldest have to leave, so that `coming` bytes fit."""
        surplus = self._nbytes + coming - (self._max_bytes or 0)
        if self._max_bytes is None or surplus <= 0:
            return 0
        return int(np.searchsorted(np.cumsum(self._aged("bytes")), surplus)) + 1

    def _evict(self, count: int) -> None:
        """Let the oldest `count` go."""
        if count <= 0:
            return
        places = self._order()[:count]
        for store in self._store.values():
            if store.dtype == object:
                store[places] = None
        self._nbytes -= int(self._tags["bytes"][places].sum())
        self._draws -= int(self._tags["draws"][places].sum())
        self._first = (self._first + len(places)) % self.capacity
        self._size -= len(places)
        self._sampler.changed()

    def _take(self, ages: Array, empty: Empty, weights: Array | None) -> Draw:
        places = (self._first + ages) % self.capacity
        # Not +=, which would count a place once that is there twice.
        np.add.at(self._tags["draws"], places, 1)
        self._draws += len(places)
        return Draw(self._gather(places, empty), places, weights)

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

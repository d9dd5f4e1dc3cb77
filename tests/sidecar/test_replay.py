from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from real_sidecar import token_rows

from mps_trainer.columns import IDENTITY_COLUMNS, Column, PackedBatch
from mps_trainer.config import ReplaySettings
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import decode_batch, encode_batch

COLUMNS = (
    *wire_columns(load_task("preference_classifier", {"max_tokens": 64})),
    Column(name="hidden", source="info.hidden", shape=(3,)),
)


def batch(size: int, first: int = 0) -> PackedBatch:
    rows = token_rows(np.random.default_rng(first), size, first)
    rows["hidden"] = np.arange(first * 3, (first + size) * 3, dtype=np.float32).reshape(size, 3)
    return decode_batch(encode_batch(rows, COLUMNS), COLUMNS)


def ids(packed: PackedBatch) -> list[str]:
    return [packed["eid"].text(i) for i in range(packed.num_rows)]


def assert_rows_belong_together(packed: PackedBatch) -> None:
    for i, eid in enumerate(ids(packed)):
        assert packed["hidden"].row(i)[0] == 3 * int(eid[1:])


def test_first_in_first_out() -> None:
    replay = ReplayBuffer(COLUMNS, capacity=10, seed=0)
    assert replay.add(batch(7)) == 7
    assert replay.add(batch(7, first=7)) == 7
    assert len(replay) == 10
    drawn = replay.sample(100)
    assert sorted(ids(drawn)) == sorted(f"e{i}" for i in range(4, 14))
    assert_rows_belong_together(drawn)
    assert replay.add(batch(25, first=20)) == 25
    assert sorted(ids(replay.sample(10))) == [f"e{i}" for i in range(35, 45)]


def test_known_experiences_are_skipped_also_shortly_after_they_left() -> None:
    replay = ReplayBuffer(COLUMNS, capacity=10, seed=0)
    replay.add(batch(10))
    assert replay.add(batch(12)) == 2
    replay.add(batch(8, first=12))
    assert replay.add(batch(5)) == 0
    assert replay.add(batch(30, first=100)) == 30
    assert replay.add(batch(5)) == 5, "after 2 * capacity others an id is forgotten"


def test_rows_are_copies() -> None:
    encoded = bytearray(
        encode_batch(token_rows(np.random.default_rng(0), 4) | {"hidden": np.ones((4, 3), np.float32)}, COLUMNS)
    )
    replay = ReplayBuffer(COLUMNS, capacity=8, seed=0)
    replay.add(decode_batch(encoded, COLUMNS))
    before = replay.sample(4)
    encoded[:] = bytes(len(encoded))
    assert replay.sample(4)["hidden"].values.sum() == 12
    for column in before.columns.values():
        assert not any(
            np.shares_memory(column.values, store) for store in replay._store.values() if store.dtype != object
        )


def test_draws_are_uniform_without_repetition_and_depend_on_the_seed_only() -> None:
    one, two, other = (ReplayBuffer(COLUMNS, capacity=20, seed=seed) for seed in (1, 1, 2))
    for replay in (one, two, other):
        replay.add(batch(20))
    draws = [ids(one.sample(5)) for _ in range(400)]
    assert draws == [ids(two.sample(5)) for _ in range(400)]
    assert draws != [ids(other.sample(5)) for _ in range(400)]
    assert all(len(set(draw)) == 5 for draw in draws)
    counts = np.unique(np.concatenate(draws), return_counts=True)[1]
    assert len(counts) == 20
    # 2,000 draws over 20 rows: 100 each, a standard deviation of 9.
    assert counts.min() > 60
    assert counts.max() < 140


WAYS: dict[str, ReplaySettings] = {
    "uniform": ReplaySettings(),
    "recency": ReplaySettings(sampling="recency", half_life=3),
    "priority": ReplaySettings(sampling="priority"),
    "balanced": ReplaySettings(class_balance=True),
    "balanced priority": ReplaySettings(sampling="priority", class_balance=True),
}


def classes_of(packed: PackedBatch) -> Any:
    return packed["reward"].values.astype(np.uint8)


def losses_of(packed: PackedBatch) -> Any:
    return np.array([int(eid[1:]) % 5 for eid in ids(packed)], np.float32)


def use(replay: ReplayBuffer, first: int, size: int) -> list[Any]:
    """Fill and draw as a learner does; what was drawn."""
    rows = batch(size, first)
    replay.add(rows, classes_of(rows))
    found = []
    for _ in range(3 if len(replay) else 0):
        draw = replay.draw(6)
        if replay.settings.sampling == "priority":
            replay.learnt(draw, losses_of(draw.rows))
        found += [ids(draw.rows), None if draw.weights is None else draw.weights.tolist()]
    return found


@pytest.mark.parametrize("max_bytes", [None, 6000])
@pytest.mark.parametrize("num_rows", [0, 5, 14])
@pytest.mark.parametrize("way", WAYS)
def test_saved_and_loaded_it_goes_on_as_before(way: str, num_rows: int, max_bytes: int | None) -> None:
    replay, successor = (ReplayBuffer(COLUMNS, 10, 3, max_bytes, WAYS[way]) for _ in range(2))
    use(replay, 0, num_rows)
    use(replay, 100, num_rows // 2)  # the ring's begin moves on, that of the successor does not
    arrays, state = replay.state()
    successor.load_state(arrays, json.loads(json.dumps(state)))
    assert (len(successor), successor.nbytes, successor.mean_draws) == (len(replay), replay.nbytes, replay.mean_draws)
    assert use(successor, 200, 8) == use(replay, 200, 8)
    assert use(successor, 300, 1) == use(replay, 300, 1)
    assert_same(successor.sample(10), replay.sample(10))
    again = batch(num_rows)
    assert successor.add(again, classes_of(again)) == replay.add(again, classes_of(again))
    assert replay.numbers_from(0).tolist() == successor.numbers_from(0).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_draws_do_not_depend_on_where_the_rows_stand(way: str) -> None:
    """Two buffers that hold the same at different places: one has had others before."""
    one, other = (ReplayBuffer(COLUMNS, 20, 3, None, WAYS[way]) for _ in range(2))
    before = batch(7, first=900)
    other.add(before, classes_of(before))
    rows = batch(20)
    for replay in (one, other):
        replay.add(rows, classes_of(rows))
    assert use(one, 20, 4) == use(other, 20, 4)


def test_bounded_in_bytes_the_oldest_leave_first() -> None:
    each = ReplayBuffer(COLUMNS, 100, 0)
    each.add(batch(40))
    limit = each.nbytes // 4
    replay = ReplayBuffer(COLUMNS, 100, 0, max_bytes=limit)
    for first in range(0, 40, 8):
        replay.add(batch(8, first))
        assert replay.nbytes <= limit
    held = sorted(int(eid[1:]) for eid in ids(replay.sample(100)))
    assert held == list(range(40 - len(held), 40))
    assert 5 <= len(held) <= 15
    # Not one more would have fitted.
    more = ReplayBuffer(COLUMNS, 100, 0)
    for first in range(0, 40, 8):
        more.add(batch(8, first))
    more.remove([f"e{i}".encode() for i in range(40 - len(held) - 1)])
    assert more.nbytes > limit
    assert replay.add(batch(60, first=100)) == 60, "one record larger than the buffer: the newest of it are held"
    assert replay.nbytes <= limit
    assert max(int(eid[1:]) for eid in ids(replay.sample(100))) == 159


def test_the_memory_of_fixed_columns_is_bounded_by_bytes_too() -> None:
    columns = (*IDENTITY_COLUMNS, Column(name="v", source="info.v", shape=(1000,)))
    assert 20 <= ReplayBuffer(columns, 10_000, 0, max_bytes=100_000).capacity < 25


def test_draws_are_counted_and_leave_with_their_experience() -> None:
    replay = ReplayBuffer(COLUMNS, 10, 0)
    assert replay.mean_draws == 0
    replay.add(batch(10))
    for _ in range(3):
        replay.sample(10)
    assert replay.mean_draws == 3
    replay.add(batch(5, first=10))
    assert replay.mean_draws == 1.5
    replay.remove([b"e5", b"e10"])
    assert replay.mean_draws == 12 / 8


def assert_same(found: PackedBatch, expected: PackedBatch) -> None:
    for name, column in expected.columns.items():
        np.testing.assert_array_equal(found[name].values, column.values)
        assert found[name].is_text == column.is_text


def test_a_draw_of_256_from_8192_is_not_slow() -> None:
    replay = ReplayBuffer(COLUMNS, capacity=8192, seed=0)
    for first in range(0, 8192, 1024):
        replay.add(batch(1024, first))
    times: list[Any] = []
    for _ in range(20):
        begin = time.perf_counter()
        replay.sample(256)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.1  # about 1 ms; the limit is for a slow and busy machine

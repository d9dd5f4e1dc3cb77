from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from real_sidecar import token_rows

from mps_trainer.columns import Column, PackedBatch
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


@pytest.mark.parametrize("num_rows", [0, 5, 14])
def test_saved_and_loaded_it_goes_on_as_before(num_rows: int) -> None:
    replay, successor = (ReplayBuffer(COLUMNS, capacity=10, seed=3) for _ in range(2))
    replay.add(batch(num_rows))
    if num_rows:
        replay.sample(3)
    arrays, state = replay.state()
    successor.load_state(arrays, state)
    for one in (replay, successor):
        one.add(batch(8, first=num_rows))
    assert len(successor) == len(replay)
    for _ in range(5):
        expected, found = replay.sample(6), successor.sample(6)
        assert ids(found) == ids(expected)
        assert_same(found, expected)
    assert successor.add(batch(num_rows)) == replay.add(batch(num_rows))


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
    assert np.median(times) < 0.05  # about 1 ms; the limit is for a busy machine

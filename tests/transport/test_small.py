"""Batches of few rows go a shorter way: the same bytes, the same errors."""

import numpy as np
import pytest
from channel_peers import COLUMNS, assert_same, make_rows, pair, take

from mps_trainer.columns import Column
from mps_trainer.errors import CorruptRecordError, ExperienceError
from mps_trainer.transport import RingSettings, decode_batch, encode_batch
from mps_trainer.transport.arrow import BatchLayout
from mps_trainer.transport.record import FLAG_WANT_SCORES, KIND_BATCH, RecordHeader, pack_whole
from mps_trainer.transport.small import MAX_BYTES, MAX_KNOWN, MAX_ROWS, SmallEncoder, place

ROOMY = RingSettings(num_slots=2, slot_bytes=2**20, reply_slot_bytes=4096)


def shorter(rows, columns=COLUMNS):
    """The bytes of the shorter way, None when it leaves the batch to the general one."""
    encoded = SmallEncoder(BatchLayout(columns)).encode(rows)
    if encoded is None:
        return None
    num_rows, nbytes, payload = encoded
    assert num_rows == len(next(iter(rows.values())))
    if isinstance(payload, list):
        assert nbytes > MAX_BYTES
        out = np.full(nbytes, 7, np.uint8)
        place(payload, out)
        payload = out.tobytes()
    assert len(payload) == nbytes
    return payload


@pytest.mark.parametrize("mean_tokens", [0, 3, 100, 2000])
@pytest.mark.parametrize("n", [1, 2, 7, MAX_ROWS])
def test_it_makes_the_same_bytes(n, mean_tokens):
    rows = make_rows(n, n, mean_tokens)
    rows["eid"][0] = "\u00e4\ud800"
    assert shorter(rows) == encode_batch(rows, COLUMNS)


def test_many_rows_and_none_go_the_general_way():
    assert shorter(make_rows(MAX_ROWS + 1)) is None
    assert shorter(make_rows(0)) is None


@pytest.mark.parametrize("length", [10, 20_000])
def test_rows_that_are_not_contiguous_arrive_whole(run_id, length):
    columns = (Column(name="x", source="x", dtype="int32", shape=(None,), maximum=40_000),)
    rows = {"x": [np.arange(2 * length, dtype=np.int32)[::2]]}
    got = shorter(rows, columns)
    assert got in (None, encode_batch(rows, columns))
    assert np.array_equal(decode_batch(encode_batch(rows, columns), columns)["x"].row(0), rows["x"][0])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("tokens", [np.zeros(3, np.int64)]),
        ("tokens", [np.zeros((1, 3), np.int32)]),
        ("tokens", [[1, 2]]),
        ("tokens", [np.zeros(3, ">i4")]),
        ("tokens", [np.zeros(5000, np.int32)]),
        ("tokens", []),
        ("feature", [np.zeros(7, np.float32)]),
        ("feature", np.zeros((1, 7), np.float32)),
        ("reward", np.zeros(1, np.float64)),
        ("reward", np.zeros((1, 1), np.float32)),
        ("eid", [b"bytes"]),
        ("eid", ["x" * 201]),
        ("eid", None),
    ],
)
def test_what_is_wrong_is_left_to_the_general_way_which_says_so(name, wrong):
    rows = make_rows(1)
    rows[name] = wrong
    if wrong is None:
        del rows[name]
    assert shorter(rows) is None
    with pytest.raises(ExperienceError, match=name):
        encode_batch(rows, COLUMNS)


def test_what_is_kept_of_shapes_has_a_bound_and_is_never_believed_of_others():
    columns = (Column(name="x", source="x", dtype="uint8", shape=(None,), maximum=10_000),)
    encoder = SmallEncoder(BatchLayout(columns))
    for length in range(MAX_KNOWN + 50):
        rows = {"x": [np.full(length, 1, np.uint8)]}
        assert encoder.encode(rows)[2] == encode_batch(rows, columns)
    assert len(encoder._metadata) <= MAX_KNOWN


def test_metadata_that_was_right_once_is_refused_with_another_length(run_id):
    with pair(run_id, ROOMY) as (_, hub):
        codec = hub._codec
        good = encode_batch(make_rows(2), COLUMNS)
        assert codec.decode(good).num_rows == codec.decode(good).num_rows == 2
        for bad in (good[:-64], good + bytes(64)):
            with pytest.raises(CorruptRecordError):
                codec.decode(bad)


@pytest.mark.parametrize("mean_tokens", [5, 2000])
def test_it_arrives_and_is_counted(run_id, mean_tokens):
    rows = make_rows(5, 3, mean_tokens)
    with pair(run_id, ROOMY, backpressure="drop_newest") as (channel, hub):
        result = channel.send(rows, request_id=9, want_scores=True)
        assert (result.parts, result.parts_sent, result.rows_sent, result.rows_dropped) == (1, 1, 5, 0)
        with take(hub) as delivery:
            assert_same(delivery.batch, rows)
            assert delivery.header[3:10] == (9, 0, 1, 0, 5, True, None)
            assert len(delivery.payload) == result.nbytes
            delivery.reply(np.arange(5, dtype=np.float32), 4)
        assert channel.receive_scores(9, 1.0).values.tolist() == [0, 1, 2, 3, 4]
        for _ in range(2):
            channel.send(rows, request_id=1, want_scores=False)
        assert channel.send(rows, request_id=2, want_scores=True).rows_dropped == 5
        assert channel.receive_scores(2, 5.0) is None
        assert channel.counters.rows_dropped_newest == 5


def test_the_header_of_a_whole_record_is_that_of_any_other():
    raw = pack_whole(11, 5, 1000, 7, 3, FLAG_WANT_SCORES)
    sent_ns = int.from_bytes(raw[72:80], "little")
    assert raw == RecordHeader(KIND_BATCH, 5, 1000, 7, 0, 1, 0, 3, True, None, 0, sent_ns).pack(11)

"""Rows to Arrow bytes and back; golden bytes; what the codec refuses."""

import numpy as np
import pyarrow as pa
import pytest
from channel_peers import COLUMNS, assert_same, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from mps_trainer.columns import DTYPES, Column
from mps_trainer.errors import CorruptRecordError, ExperienceError, TransportError
from mps_trainer.transport import Codec, decode_batch, encode_batch

ARROW_SCHEMA = pa.schema(
    [
        ("eid", pa.utf8()),
        ("reward", pa.float32()),
        ("tokens", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.uint8())),
        ("feature", pa.list_(pa.float32(), 8)),
    ]
)


def every_type():
    scalars = [Column(name=f"s_{t}", source="x", dtype=t) for t in DTYPES]
    vectors = [Column(name=f"v_{t}", source="x", dtype=t, shape=(3,)) for t in DTYPES]
    ragged = [Column(name=f"r_{t}", source="x", dtype=t, shape=(None,), maximum=50) for t in DTYPES]
    return [*scalars, *vectors, *ragged, Column(name="t", source="x", dtype="text", maximum=50)]


def rows_for(columns, n, rng):
    def some(dtype, size):
        return rng.integers(0, 2, size).astype(dtype)

    rows = {}
    for c in columns:
        if c.kind == "text":
            rows[c.name] = ["".join(rng.choice(list("aö中😀"), rng.integers(0, 5))) for _ in range(n)]
        elif c.kind == "scalar":
            rows[c.name] = some(c.dtype, n)
        elif c.kind == "vector":
            rows[c.name] = some(c.dtype, (n, c.width))
        else:
            rows[c.name] = [some(c.dtype, rng.integers(0, 9)) for _ in range(n)]
    return rows


@pytest.mark.parametrize("n", [0, 1, 2, 7, 64])
def test_arrow_reads_what_we_write(n):
    rows = make_rows(n)
    message = pa.ipc.read_message(pa.py_buffer(encode_batch(rows, COLUMNS)))
    batch = pa.ipc.read_record_batch(message, ARROW_SCHEMA)
    batch.validate(full=True)
    assert batch.num_rows == n
    got = batch.to_pydict()
    assert got["eid"] == rows["eid"]
    assert got["tokens"] == [list(row) for row in rows["tokens"]]
    assert got["mask"] == [list(row) for row in rows["mask"]]
    assert got["feature"] == [list(row) for row in rows["feature"]]


@pytest.mark.parametrize("n", [0, 1, 13])
def test_every_type_comes_back_as_it_was(n):
    columns = every_type()
    rows = rows_for(columns, n, np.random.default_rng(n))
    batch = decode_batch(encode_batch(rows, columns), columns)
    assert batch.num_rows == n
    for c in columns:
        for i in range(n):
            if c.kind == "text":
                assert batch[c.name].text(i) == rows[c.name][i]
            else:
                assert batch[c.name].values.dtype == c.dtype
                np.testing.assert_array_equal(batch[c.name].row(i), rows[c.name][i])


def test_columns_are_aligned_and_not_copied():
    raw = np.frombuffer(encode_batch(make_rows(9), COLUMNS), np.uint8)
    aligned = np.zeros(raw.nbytes + 64, np.uint8)
    start = -aligned.ctypes.data % 64
    place = aligned[start : start + raw.nbytes]
    place[:] = raw
    batch = decode_batch(place, COLUMNS)
    for column in batch.columns.values():
        assert column.values.ctypes.data % 64 == 0
        assert np.shares_memory(column.values, place)
        assert column.offsets is None or column.offsets.ctypes.data % 64 == 0


def test_bytes_do_not_depend_on_what_lay_in_the_slot():
    codec = Codec(COLUMNS)
    rows = codec.measure(make_rows(5))
    message = codec.message(rows, 0, 5)
    clean, dirty = np.zeros(message.nbytes, np.uint8), np.full(message.nbytes, 0xAA, np.uint8)
    for out in (clean, dirty):
        codec.write(rows, 0, 5, message, out)
    np.testing.assert_array_equal(clean, dirty)


@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(2500, 20000))
@settings(max_examples=60, deadline=None)
def test_parts_cover_the_batch_in_order_and_fit(n, seed, capacity):
    codec, rows = Codec(COLUMNS), make_rows(n, seed, mean_tokens=60)
    measured = codec.measure(rows)
    ranges = codec.split(measured, capacity)
    assert [r[0] for r in ranges] == [0, *[r[1] for r in ranges[:-1]]]
    assert ranges[-1][1] == n
    for start, stop in ranges:
        message = codec.message(measured, start, stop)
        assert message.nbytes <= capacity
        out = np.empty(message.nbytes, np.uint8)
        codec.write(measured, start, stop, message, out)
        assert_same(codec.decode(out), rows, start)


def test_split_keeps_to_a_number_of_rows():
    codec = Codec(COLUMNS)
    assert codec.split(codec.measure(make_rows(10)), 2**20, max_rows=4) == [(0, 4), (4, 8), (8, 10)]


def test_a_row_that_fits_no_slot_names_the_setting():
    codec, rows = Codec(COLUMNS), make_rows(3)
    rows["tokens"][1] = np.zeros(4096, np.int32)
    with pytest.raises(TransportError, match=r"row 1 takes .* a slot holds 8000(.|\n)*ring_slot"):
        codec.split(codec.measure(rows), 8000)


def broken(name, value):
    rows = make_rows(3)
    rows[name] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (broken("reward", np.zeros(3, np.float64)), "reward.*float64"),
        (broken("reward", np.zeros((3, 1), np.float32)), "reward"),
        (broken("reward", ["a", "b", "c"]), "reward"),
        (broken("tokens", [np.zeros(3, np.int64)] * 3), "tokens.*int64"),
        (broken("tokens", [np.zeros((3, 1), np.int32)] * 3), "tokens.*2d"),
        (broken("tokens", [np.zeros(5000, np.int32)] * 3), "tokens.*5000.*4096"),
        (broken("mask", [np.zeros(3, np.uint8)] * 3), "mask.*uint8"),
        (broken("feature", [np.zeros(7, np.float32)] * 3), "feature.*7"),
        (broken("feature", np.zeros((3, 9), np.float32)), "feature"),
        (broken("eid", [1, 2, 3]), "eid"),
        (broken("eid", ["x" * 201] * 3), "eid"),
        (broken("eid", ["a"]), "rows"),
        ({"eid": ["a"]}, "reward"),
    ],
)
def test_rows_that_do_not_fit_the_columns_are_refused_by_name(rows, says):
    with pytest.raises(ExperienceError, match=says):
        encode_batch(rows, COLUMNS)


def test_a_lone_surrogate_does_not_stop_a_batch():
    rows = make_rows(1)
    rows["eid"] = ["a\ud800b"]
    assert decode_batch(encode_batch(rows, COLUMNS), COLUMNS)["eid"].text(0) == "a?b"


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, 500, -64, -1])
def test_a_cut_message_is_refused(cut):
    raw = encode_batch(make_rows(4), COLUMNS)
    with pytest.raises(CorruptRecordError):
        decode_batch(raw[:cut], COLUMNS)


def test_a_longer_message_is_refused():
    with pytest.raises(CorruptRecordError):
        decode_batch(encode_batch(make_rows(4), COLUMNS) + b"\0" * 64, COLUMNS)


def test_another_schema_is_refused():
    raw = encode_batch(make_rows(4), COLUMNS)
    with pytest.raises(CorruptRecordError):
        decode_batch(raw, COLUMNS[:-1])


def test_offsets_that_wrap_around_are_refused():
    # int32 differences of these are all small and positive.
    column = [Column(name="t", source="t", dtype="uint8", shape=(None,), maximum=2**31 - 1)]
    raw = bytearray(encode_batch({"t": [np.zeros(2, np.uint8)] * 3}, column))
    at = raw.index(np.array([0, 2, 4, 6], np.int32).tobytes())
    raw[at : at + 16] = np.array([0, 2**31 - 1, -(2**31), 6], np.int32).tobytes()
    with pytest.raises(CorruptRecordError, match="offsets"):
        decode_batch(bytes(raw), column)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_mutated_bytes_give_an_error_or_a_batch_in_bounds(data):
    raw = bytearray(encode_batch(make_rows(3, 1), COLUMNS))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 8))
        raw[at : at + 8] = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    try:
        batch = decode_batch(bytes(raw), COLUMNS)
    except CorruptRecordError:
        return
    assert batch.num_rows == 3
    for column in COLUMNS:
        packed = batch[column.name]
        for i in range(3):
            packed.row(i).tobytes()
        if packed.offsets is not None:
            assert packed.offsets[0] == 0
            assert packed.offsets[-1] == len(packed.values)
            assert (np.diff(packed.offsets) >= 0).all()

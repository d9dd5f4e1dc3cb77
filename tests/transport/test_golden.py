"""Frozen bytes. A change here is a change of the wire format: raise `layout.VERSION` or `record.VERSION` and
docs/wire_format.md with it, then run `python tests/transport/test_golden.py` to write the files anew."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from channel_peers import COLUMNS, assert_same
from test_batch_codec import ARROW_SCHEMA

from mps_trainer.transport import RingSettings, decode_batch, encode_batch, schema
from mps_trainer.transport.layout import SegmentHeader, unpack_header
from mps_trainer.transport.record import KIND_BATCH, KIND_SCORES, RecordHeader, unpack_record
from mps_trainer.transport.replies import REPLY_COLUMNS

GOLDEN = Path(__file__).parent / "golden"
ROWS = {
    "eid": ["0/a/1/0/7", "0/\u00e4/1/0/8", ""],
    "reward": np.array([1.0, -0.5, 0.25], np.float32),
    "tokens": [np.array(t, np.int32) for t in ([1, 2, 3], [], [40000])],
    "mask": [np.array(m, np.bool_) for m in ([True, False, True], [], [True])],
    "feature": np.arange(24, dtype=np.float32).reshape(3, 8),
}
HEADER = SegmentHeader(
    run_id="golden",
    index=3,
    generation=0x0123456789ABCDEF,
    settings=RingSettings(4, 11 * 2**20, 4, 256 * 2**10),
    policy="block",
    uid=1000,
    pid=4321,
    pid_start=987654,
    created_ns=1_700_000_000_000_000_000,
    schema_hash=schema.digest(schema.describe(COLUMNS)),
    schema=schema.describe(COLUMNS),
)
BATCH = RecordHeader(KIND_BATCH, 5, 1856, 77, 1, 3, 128, 64, True, 0xDEADBEEF, 0, 123_456_789, 0)
REPLY = RecordHeader(KIND_SCORES, 2, 320, 77, 1, 3, 128, 64, True, None, 41, 123_999_999, 54_321, 122_000_000)


def made():
    return {
        "batch.arrow": encode_batch(ROWS, COLUMNS),
        "scores.arrow": encode_batch({"score": np.array([0.5, 2.0], np.float32)}, REPLY_COLUMNS),
        "segment_header.bin": HEADER.pack(),
        "schema.json": HEADER.schema,
        "batch_record.bin": BATCH.pack(HEADER.generation),
        "reply_record.bin": REPLY.pack(HEADER.generation),
    }


@pytest.mark.parametrize("name", sorted(made()))
def test_we_write_the_frozen_bytes(name):
    assert made()[name] == (GOLDEN / name).read_bytes()


def test_we_read_the_frozen_bytes():
    assert_same(decode_batch((GOLDEN / "batch.arrow").read_bytes(), COLUMNS), ROWS)
    page = (GOLDEN / "segment_header.bin").read_bytes().ljust(2048, b"\0") + (GOLDEN / "schema.json").read_bytes()
    assert unpack_header(page.ljust(4096, b"\0"), HEADER.segment_bytes) == HEADER
    for name, header, kind in (("batch", BATCH, KIND_BATCH), ("reply", REPLY, KIND_SCORES)):
        raw = (GOLDEN / f"{name}_record.bin").read_bytes()
        read = unpack_record(raw, generation=HEADER.generation, seq=header.seq, capacity=4096, kind=kind)
        assert read == header


def test_arrow_reads_the_frozen_bytes():
    message = pa.ipc.read_message(pa.py_buffer((GOLDEN / "batch.arrow").read_bytes()))
    batch = pa.ipc.read_record_batch(message, ARROW_SCHEMA)
    batch.validate(full=True)
    assert batch["eid"].to_pylist() == ROWS["eid"]
    assert batch["tokens"].to_pylist() == [[1, 2, 3], [], [40000]]


if __name__ == "__main__":
    for name, raw in made().items():
        (GOLDEN / name).write_bytes(raw)

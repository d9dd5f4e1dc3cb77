"""Frozen bytes of a snapshot of weights. A change here is a change of the format: raise `weights_layout.VERSION` and
docs/wire_format.md with it, then run `python tests/transport/test_weights_golden.py` to write the file anew."""

from pathlib import Path

from mps_trainer.transport.weights_layout import (
    MANIFEST,
    SnapshotHead,
    WeightsEntry,
    WeightsHeader,
    head_offset,
    unpack_head,
    unpack_weights_header,
)

GOLDEN = Path(__file__).parent / "golden" / "weights.bin"
HEADER = WeightsHeader(
    run_id="golden",
    generation=0x0123456789ABCDEF,
    uid=1000,
    pid=4321,
    pid_start=987654,
    created_ns=1_700_000_000_000_000_000,
    entries=(WeightsEntry("linear.weight", "float32", (2, 3)), WeightsEntry("bias", "bfloat16", ())),
)
HEAD = SnapshotHead(7, 350, 122_000_000, 123_000_000, 0xDEADBEEF)


def made():
    raw = bytearray(MANIFEST) + HEADER.manifest
    raw[:128] = HEADER.pack()
    raw[128:136] = (7).to_bytes(8, "little")
    raw[head_offset(7) : head_offset(7) + 64] = HEAD.pack(HEADER.generation)
    return bytes(raw)


def test_we_write_the_frozen_bytes():
    assert made() == GOLDEN.read_bytes()


def test_we_read_the_frozen_bytes():
    raw = GOLDEN.read_bytes()
    assert unpack_weights_header(raw, HEADER.file_bytes) == HEADER
    assert unpack_head(raw[256:320], HEADER.generation) == HEAD
    assert HEADER.header_bytes == 4096
    assert HEADER.offsets == [0, 64]
    assert HEADER.file_bytes == 3 * 4096


if __name__ == "__main__":
    GOLDEN.write_bytes(made())

"""The 128 bytes before every payload: what it is, which part of which request, and a checksum of the header itself.

The state word of a slot says *that* a record is there; this header says *which*. A reader believes a record
only if the sequence number of both agree, the generation is that of the segment and the CRC is right.
"""

from __future__ import annotations

import struct
import time
import zlib
from typing import NamedTuple

from mps_trainer.errors import CorruptRecordError
from mps_trainer.transport.layout import RECORD_HEADER_BYTES

MAGIC = b"MPRC"
VERSION = 2
KIND_BATCH, KIND_SCORES = 1, 2
FLAG_WANT_SCORES, FLAG_CHECKSUM = 1, 2

_RECORD = struct.Struct("<4sHHQQQQIIIIIIqqqq28xI")
assert _RECORD.size == RECORD_HEADER_BYTES
_BODY = struct.Struct("<4sHHQQQQIIIIIIqqqq28x")
_CRC = struct.Struct("<I")
SENT_NS_OFFSET = 72
_new = tuple.__new__


class RecordHeader(NamedTuple):
    """Names a record and says what its payload is.

    Attributes:
        channel: name of the channel that it came through (not on the wire).
        kind: KIND_BATCH or KIND_SCORES.
        seq: number of the record in its ring, from 1, without gaps except for dropped records.
        payload_bytes: length of the payload.
        request_id: the caller's name for the batch; all parts and their replies carry it.
        part, parts: this part, from 0, and how many there are.
        first_row: index of this part's first row in the batch as it was sent.
        num_rows: rows in this part.
        want_scores: the operator waits for scores.
        payload_crc: CRC-32 of the payload, or None when checksums are off.
        model_version: in a reply, the model that scored.
        sent_ns: CLOCK_MONOTONIC when the record was sent.
        sidecar_ns: in a reply, nanoseconds from claiming the batch to replying.
        trained_ns: in a reply, CLOCK_MONOTONIC when that model last took a training step; 0 when it is not known.
    """

    kind: int
    seq: int
    payload_bytes: int
    request_id: int
    part: int = 0
    parts: int = 1
    first_row: int = 0
    num_rows: int = 0
    want_scores: bool = False
    payload_crc: int | None = None
    model_version: int = 0
    sent_ns: int = 0
    sidecar_ns: int = 0
    trained_ns: int = 0
    channel: str = ""

    def pack(self, generation: int) -> bytes:
        """The header as it stands in the slot, `RECORD_HEADER_BYTES` long."""
        flags = (FLAG_WANT_SCORES if self.want_scores else 0) | (0 if self.payload_crc is None else FLAG_CHECKSUM)
        body = _BODY.pack(
            MAGIC, VERSION, self.kind, generation, self.seq, self.payload_bytes, self.request_id, self.part,
            self.parts, self.first_row, self.num_rows, flags, self.payload_crc or 0, self.model_version,
            self.sent_ns, self.sidecar_ns, self.trained_ns,
        )  # fmt: skip
        return body + _CRC.pack(zlib.crc32(body))


def pack_whole(generation: int, seq: int, payload_bytes: int, request_id: int, num_rows: int, flags: int) -> bytes:
    """The header of a batch that is one record, sent now: what `RecordHeader.pack` makes, in half the time."""
    body = _BODY.pack(
        MAGIC, VERSION, KIND_BATCH, generation, seq, payload_bytes, request_id, 0, 1, 0, num_rows, flags, 0, 0,
        time.monotonic_ns(), 0, 0,
    )  # fmt: skip
    return body + _CRC.pack(zlib.crc32(body))


def unpack_record(
    raw: bytes, *, generation: int, seq: int, capacity: int, kind: int, channel: str = ""
) -> RecordHeader:
    """Read and check a header against what its slot says.

    Raises CorruptRecordError when anything does not add up; nothing of the payload is touched before.
    """
    (magic, version, found_kind, found_generation, found_seq, payload_bytes, request_id, part, parts,
     first_row, num_rows, flags, payload_crc, model_version, sent_ns, sidecar_ns, trained_ns,
     crc) = _RECORD.unpack(raw)  # fmt: skip
    if magic != MAGIC or version != VERSION or crc != zlib.crc32(raw[:-4]):
        raise CorruptRecordError(f"record {seq} of {channel} has a broken header")
    if found_seq != seq or found_generation != generation or found_kind != kind:
        raise CorruptRecordError(
            f"slot of {channel} holds record {found_seq} (kind {found_kind}), expected {seq} (kind {kind})"
        )
    if payload_bytes > capacity or part >= parts or flags & ~3:
        raise CorruptRecordError(
            f"record {seq} of {channel} claims {payload_bytes} of {capacity} bytes, part {part} of {parts}"
        )
    # Without the defaults and keywords of its constructor, which cost as much as all checks together.
    return _new(
        RecordHeader,
        (kind, seq, payload_bytes, request_id, part, parts, first_row, num_rows, bool(flags & FLAG_WANT_SCORES),
         payload_crc if flags & FLAG_CHECKSUM else None, model_version, sent_ns, sidecar_ns, trained_ns,
         channel),
    )  # fmt: skip

"""Where everything stands in a segment: the header page, the state words, the slots. Specified in
docs/wire_format.md.

0      static header, written once by the operator, `MAGIC` last; a CRC covers it and the schema
192    words of the sidecar: attachment, doorbell, counters, why it refused this channel
512    counters of the operator
1024   one state word per feed slot      (8 bytes each)
1536   one state word per reply slot
2048   the schema, JSON
4096*h feed slots, then reply slots, each on a page boundary
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from mps_trainer.errors import ConfigError, CorruptRecordError, TransportError

MAGIC = b"MPSTCHAN"
VERSION = 2
PAGE = 4096
RECORD_HEADER_BYTES = 128
MAX_SLOTS = 64

_STATIC = struct.Struct("<8sIIQIIQQQIIqqII32s32sII")
STATIC_BYTES = _STATIC.size
assert STATIC_BYTES == 160

SIDECAR_WORDS = 192
SIDECAR_COUNTERS = 224
REFUSAL = 288
REFUSAL_BYTES = 208
OPERATOR_COUNTERS = 512
FEED_STATES = 1024
REPLY_STATES = 1536
SCHEMA = 2048

# Bytes of the lock file's range (not of memory) that stand for something while they are locked.
LOCK_OPERATOR_LIFE, LOCK_SIDECAR_LIFE, LOCK_FEED, LOCK_REPLY = 0, 1, 2, 3

STATUS_DETACHED, STATUS_ATTACHED, STATUS_REFUSED = 0, 1, 2

POLICIES = ("drop_oldest", "drop_newest", "block")


@dataclass(frozen=True)
class RingSettings:
    """Sizes of one channel; the default segment fits the 64 MB that a container's /dev/shm has.

    Attributes:
        num_slots: feed slots, 2 to 64. Two keep writer and reader busy, more ride out a slow reader.
        slot_bytes: size of a feed slot; one row of a batch must fit, a larger batch is split by rows.
        reply_slots: reply slots, 2 to 64; 0 makes as many as feed slots. With fewer, replies to a batch of many parts
            can push each other out before the operator looks.
        reply_slot_bytes: size of a reply slot; a score takes 4 bytes.
        checksum: protect payloads by a CRC-32 besides the header, at about a millisecond per 1 to 3 MB.
    """

    num_slots: int = 4
    slot_bytes: int = 11 * 2**20
    reply_slots: int = 0
    reply_slot_bytes: int = 256 * 2**10
    checksum: bool = False

    def __post_init__(self) -> None:
        if self.reply_slots == 0:
            object.__setattr__(self, "reply_slots", self.num_slots)
        for setting, value in (("ring_slots", self.num_slots), ("reply_slots", self.reply_slots)):
            if not 2 <= value <= MAX_SLOTS:
                raise ConfigError(f"{setting} is {value}", f"choose 2 to {MAX_SLOTS}")
        for setting, value in (("ring_slot", self.slot_bytes), ("reply_slot", self.reply_slot_bytes)):
            if not PAGE <= value < 2**40:
                raise ConfigError(f"{setting} is {value} bytes", "choose at least 4096")


def round_up(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


@dataclass(frozen=True)
class SegmentHeader:
    """The static header of a segment: what it is, who made it, how large its parts are."""

    run_id: str
    index: int
    generation: int
    settings: RingSettings
    policy: str
    uid: int
    pid: int
    pid_start: int
    created_ns: int
    schema_hash: bytes
    schema: bytes

    @property
    def header_bytes(self) -> int:
        """Bytes before the first feed slot."""
        return round_up(SCHEMA + len(self.schema), PAGE)

    @property
    def feed_stride(self) -> int:
        """Distance between two feed slots."""
        return round_up(self.settings.slot_bytes, PAGE)

    @property
    def reply_stride(self) -> int:
        """Distance between two reply slots."""
        return round_up(self.settings.reply_slot_bytes, PAGE)

    @property
    def reply_offset(self) -> int:
        """Offset of the first reply slot."""
        return self.header_bytes + self.settings.num_slots * self.feed_stride

    @property
    def segment_bytes(self) -> int:
        """Size of the whole segment."""
        return self.reply_offset + self.settings.reply_slots * self.reply_stride

    def pack(self) -> bytes:
        """The static part with its magic and CRC, `STATIC_BYTES` long. The schema follows at `SCHEMA`."""
        s = self.settings
        parts = (
            MAGIC, VERSION, self.header_bytes, self.generation, s.num_slots, s.reply_slots, s.slot_bytes,
            s.reply_slot_bytes, self.segment_bytes, self.uid, self.pid, self.pid_start, self.created_ns,
            POLICIES.index(self.policy) | (16 if s.checksum else 0), len(self.schema), self.schema_hash,
            self.run_id.encode("ascii"), self.index,
        )  # fmt: skip
        body = _STATIC.pack(*parts, 0)[:-4]
        return body + struct.pack("<I", zlib.crc32(self.schema, zlib.crc32(body[8:])))


def read_version(raw: bytes) -> int:
    """The format version of a segment, which stands at the same place in every version.

    Raises CorruptRecordError when `raw` does not begin with the magic.
    """
    if len(raw) < 12 or raw[:8] != MAGIC:
        raise CorruptRecordError("this is no channel of mps_trainer, or its maker died while making it")
    return int(struct.unpack_from("<I", raw, 8)[0])


def unpack_header(raw: bytes, file_bytes: int) -> SegmentHeader:
    """Read and check a static header. `raw` is the head of the segment, at least its header pages.

    Raises TransportError for another version, CorruptRecordError for numbers that do not add up.
    """
    version = read_version(raw)
    if version != VERSION:
        raise TransportError(
            f"the channel speaks version {version}, this program version {VERSION}",
            "install the same mps-trainer for the operator and the sidecar",
        )
    if len(raw) < SCHEMA:
        raise CorruptRecordError(f"a segment of {len(raw)} bytes has no room for its header")
    (_, _, header_bytes, generation, num_slots, reply_slots, slot_bytes, reply_slot_bytes, segment_bytes,
     uid, pid, pid_start, created_ns, policy, schema_bytes, schema_hash, run_id, index,
     crc) = _STATIC.unpack_from(raw)  # fmt: skip
    schema = raw[SCHEMA : SCHEMA + schema_bytes]
    if crc != zlib.crc32(schema, zlib.crc32(raw[8 : STATIC_BYTES - 4])):
        raise CorruptRecordError("the header of the channel does not match its checksum")
    try:
        settings = RingSettings(num_slots, slot_bytes, reply_slots, reply_slot_bytes, bool(policy & 16))
        header = SegmentHeader(
            run_id.rstrip(b"\0").decode("ascii"), index, generation, settings, POLICIES[policy & 15],
            uid, pid, pid_start, created_ns, schema_hash, schema,
        )  # fmt: skip
    except (ConfigError, IndexError, UnicodeDecodeError) as error:
        raise CorruptRecordError(f"the header of the channel holds impossible values: {error}") from error
    if len(schema) != schema_bytes or (header.header_bytes, header.segment_bytes, file_bytes) != (
        header_bytes, segment_bytes, segment_bytes,
    ):  # fmt: skip
        raise CorruptRecordError(f"the header of the channel describes {segment_bytes} bytes, it has {file_bytes}")
    return header

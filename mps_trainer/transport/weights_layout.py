"""Where everything stands in a snapshot of weights. Specified in docs/wire_format.md. Imports nothing heavy.

0      static header, written once by the sidecar, `MAGIC` last; a CRC covers it and the manifest
128    the number of the newest whole snapshot, from 1; 0: none yet
192    head of buffer 0, then of buffer 1: snapshot n stands in buffer n % 2
512    the manifest, JSON
4096*h buffer 0, then buffer 1, each on a page boundary
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mps_trainer.errors import CorruptRecordError, TransportError
from mps_trainer.transport.layout import PAGE, round_up

MAGIC = b"MPSTWGTS"
VERSION = 1
_STATIC = struct.Struct("<8sIIQQQIIqq32sI24xI")
STATIC_BYTES = _STATIC.size
assert STATIC_BYTES == 128
CURRENT = 128
HEADS = 192
_HEAD = struct.Struct("<4sIQQqqqQII")
HEAD_BYTES = _HEAD.size
assert HEAD_BYTES == 64
_HEAD_MAGIC = b"MPWS"
MANIFEST = 512
#: Far more than the names of any model that fits beside a rollout.
MAX_MANIFEST_BYTES = 16 * 2**20
ALIGNMENT = 64

# Bytes of the lock file's range that stand for something while they are locked: as in a channel's segment.
LOCK_READER_LIFE, LOCK_WRITER_LIFE = 0, 1

#: What a tensor may be made of, by its name in torch and in safetensors' sense: plain numbers of so many bytes.
DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4,
    "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


class WeightsEntry(NamedTuple):
    """One tensor of a model.

    Attributes:
        name: its key in the model's state_dict.
        dtype: a key of `DTYPE_BYTES`.
        shape: () for a single number.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightsHeader:
    """The static part of a snapshot's file.

    Attributes:
        generation: random and odd; another one with every file that is made.
        pid, pid_start: of the sidecar that made it, for messages.
    """

    run_id: str
    generation: int
    uid: int
    pid: int
    pid_start: int
    created_ns: int
    entries: tuple[WeightsEntry, ...]

    @property
    def manifest(self) -> bytes:
        """The JSON that says what the buffers hold."""
        rows = [{"dtype": e.dtype, "name": e.name, "shape": list(e.shape)} for e in self.entries]
        return json.dumps(rows, separators=(",", ":"), sort_keys=True).encode()

    @property
    def header_bytes(self) -> int:
        """Bytes before the first buffer."""
        return round_up(MANIFEST + len(self.manifest), PAGE)

    @property
    def offsets(self) -> list[int]:
        """Where each tensor begins in a buffer."""
        found, at = [], 0
        for entry in self.entries:
            found.append(at)
            at += round_up(entry.nbytes, ALIGNMENT)
        return found

    @property
    def data_bytes(self) -> int:
        """Size of one buffer, without what fills it up to a page."""
        return sum(round_up(entry.nbytes, ALIGNMENT) for entry in self.entries)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.buffer_offset(2)

    def buffer_offset(self, index: int) -> int:
        """Where buffer `index`, 0 or 1, begins."""
        return self.header_bytes + index * round_up(self.data_bytes, PAGE)

    def pack(self) -> bytes:
        """The static part, `STATIC_BYTES` long. The manifest follows at `MANIFEST`."""
        manifest = self.manifest
        body = _STATIC.pack(
            MAGIC, VERSION, self.header_bytes, self.generation, self.data_bytes, self.file_bytes, self.uid, self.pid,
            self.pid_start, self.created_ns, self.run_id.encode("ascii"), len(manifest), 0,
        )[:-4]  # fmt: skip
        return body + struct.pack("<I", zlib.crc32(manifest, zlib.crc32(body[8:])))


class SnapshotHead(NamedTuple):
    """What stands in one buffer.

    Attributes:
        number: of the snapshot, from 1.
        version: training steps that the model had taken.
        trained_ns: CLOCK_MONOTONIC when it took the last of them.
        published_ns: CLOCK_MONOTONIC when the snapshot was written.
        crc: CRC-32 of the tensors' bytes, one after the other.
    """

    number: int
    version: int
    trained_ns: int
    published_ns: int
    crc: int

    def pack(self, generation: int) -> bytes:
        """The head as it stands in the file, `HEAD_BYTES` long."""
        body = _HEAD.pack(
            _HEAD_MAGIC, 0, generation, self.number, self.version, self.trained_ns, self.published_ns, 0, self.crc, 0
        )[:-4]
        return body + struct.pack("<I", zlib.crc32(body))


def head_offset(number: int) -> int:
    """Where the head of snapshot `number` stands."""
    return HEADS + (number % 2) * HEAD_BYTES


def unpack_head(raw: bytes, generation: int) -> SnapshotHead:
    """Read and check a head. Raises CorruptRecordError."""
    if len(raw) != HEAD_BYTES or raw[:4] != _HEAD_MAGIC or zlib.crc32(raw[:-4]) != struct.unpack("<I", raw[-4:])[0]:
        raise CorruptRecordError("a snapshot of weights has a broken head")
    _, _, found, number, version, trained_ns, published_ns, _, crc, _ = _HEAD.unpack(raw)
    if found != generation:
        raise CorruptRecordError("a snapshot of weights is of another file")
    return SnapshotHead(number, version, trained_ns, published_ns, crc)


def unpack_weights_header(raw: bytes, file_bytes: int) -> WeightsHeader:
    """Read and check a static header. `raw` is the head of the file, at least up to the end of its manifest.

    Raises TransportError for another version, CorruptRecordError for whatever does not add up.
    """
    if len(raw) < STATIC_BYTES or raw[:8] != MAGIC:
        raise CorruptRecordError("this is no snapshot of weights, or its maker died while making it")
    (_, version, header_bytes, generation, data_bytes, size, uid, pid, pid_start, created_ns, run_id, manifest_bytes,
     crc) = _STATIC.unpack_from(raw)  # fmt: skip
    if version != VERSION:
        raise TransportError(
            f"the snapshot of weights has version {version}, this program speaks version {VERSION}",
            "install the same mps-trainer for the operator and the sidecar",
        )
    manifest = raw[MANIFEST : MANIFEST + manifest_bytes]
    if len(manifest) != manifest_bytes or crc != zlib.crc32(manifest, zlib.crc32(raw[8 : STATIC_BYTES - 4])):
        raise CorruptRecordError("the header of a snapshot of weights does not match its checksum")
    try:
        name = run_id.rstrip(b"\0").decode("ascii")
        header = WeightsHeader(name, generation, uid, pid, pid_start, created_ns, _entries(json.loads(manifest)))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptRecordError(f"the manifest of a snapshot of weights is none: {error}") from error
    found = header.header_bytes, header.data_bytes, header.file_bytes, header.file_bytes, header.manifest
    if found != (header_bytes, data_bytes, size, file_bytes, manifest):
        raise CorruptRecordError(f"the header of a snapshot of weights describes {size} bytes, it has {file_bytes}")
    return header


def manifest_bytes_of(raw: bytes) -> int:
    """How long the manifest says that it is, from the static part; CorruptRecordError when that cannot be."""
    if len(raw) < STATIC_BYTES or raw[:8] != MAGIC:
        raise CorruptRecordError("this is no snapshot of weights, or its maker died while making it")
    count = int(_STATIC.unpack_from(raw)[11])
    if count > MAX_MANIFEST_BYTES:
        raise CorruptRecordError(f"the manifest of a snapshot of weights claims {count} bytes")
    return count


def _entries(rows: Any) -> tuple[WeightsEntry, ...]:
    if not isinstance(rows, list):
        raise TypeError("it is no list")
    return tuple(_entry(row["name"], row["dtype"], row["shape"]) for row in rows)


def _entry(name: Any, dtype: Any, shape: Any) -> WeightsEntry:
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"it holds {name!r} of {dtype!r}")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise ValueError(f"{name!r} has shape {shape!r}")
    return WeightsEntry(name, dtype, tuple(shape))


def check_entries(entries: Sequence[WeightsEntry]) -> tuple[WeightsEntry, ...]:
    """The entries if a manifest can hold them, else ValueError."""
    return tuple(_entry(entry.name, entry.dtype, list(entry.shape)) for entry in entries)

"""What the sidecar is doing right now: the file `doing` in the run folder, for the hour of its death.

Maker: the sidecar, at each record and each step (microseconds, no fsync). Eater: the supervisor, which sees by the beat
that the sidecar has hung, and after a death which experiences were in work.

    header   16 B   "MPSD" | stage u8 | slot u8 | - | beat i64, CLOCK_MONOTONIC in ns
    slot 0, slot 1  bytes, crc32, JSON bytes, n (u32 each) | JSON | n + 1 offsets i32 | ids as text

A new subject goes into the slot that is not valid, then the header names that slot: so a writer that is killed at any
instruction leaves the old subject or the new one. The file is written in place, never mapped: a full disk under a
mapping is a SIGBUS.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
import zlib
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

_FILE = "doing"
_MAGIC = b"MPSD"
_HEADER = struct.Struct("<4sBB2xq")
_SLOT = struct.Struct("<IIII")
_SLOTS_AT = 64
_LARGEST_SLOT = 4 * 2**20
_SHOWN_IDS = 5
_SHOWN_CHARACTERS = 40


class Stage(IntEnum):
    """What the sidecar is at. Only in those of `WITH_EXPERIENCES` do experiences decide what happens."""

    WAITING = 0
    SAVING = 1
    SCORING = 2
    EVALUATING = 3
    TAKING = 4
    TRAINING = 5
    WRITING = 6
    PACING = 7


WITH_EXPERIENCES = frozenset({Stage.SCORING, Stage.EVALUATING, Stage.TAKING, Stage.TRAINING})
_WORDS = {
    Stage.WAITING: "waiting for records",
    Stage.SAVING: "saving a checkpoint",
    Stage.SCORING: "in score()",
    Stage.EVALUATING: "in predictions()",
    Stage.TAKING: "taking experiences into the replay buffer",
    Stage.TRAINING: "in loss() or the optimizer",
    Stage.WRITING: "writing its journal, metrics or status",
    Stage.PACING: "in the pace, which decides when to train",
}


@dataclass(frozen=True)
class RecordRef:
    """One record of an operator's channel. `seq` and `sent_ns` make it unique over the run."""

    channel: str
    seq: int
    request_id: int
    part: int
    sent_ns: int


@dataclass(frozen=True)
class Subject:
    """What is in work.

    Attributes:
        step: training steps that the model has taken before.
        record: None for a training step, which draws from the replay buffer.
        eids: the experiences' ids; fewer than there are when they do not fit.
    """

    step: int
    record: RecordRef | None
    eids: tuple[str, ...]

    def __str__(self) -> str:
        where = f"training step {self.step}"
        if self.record is not None:
            where = f"record {self.record.seq} of request {self.record.request_id} of {self.record.channel}"
        return f"{where} ({describe_ids(self.eids)})"


@dataclass(frozen=True)
class Doing:
    """One look at the file. `subject` is None before the first one, and when a live writer was faster than the look."""

    stage: Stage
    beat_ns: int
    subject: Subject | None

    def __str__(self) -> str:
        if self.stage not in WITH_EXPERIENCES or self.subject is None:
            return _WORDS[self.stage]
        return f"{_WORDS[self.stage]}, {self.subject}"


def describe_ids(eids: tuple[str, ...]) -> str:
    """ "experiences a, b and 62 more"."""
    shown = [eid if len(eid) <= _SHOWN_CHARACTERS else f"{eid[: _SHOWN_CHARACTERS - 3]}..." for eid in eids]
    more = f" and {len(eids) - _SHOWN_IDS} more" if len(eids) > _SHOWN_IDS else ""
    return f"experiences {', '.join(shown[:_SHOWN_IDS])}{more}"


class DoingFile:
    """The writer's side. One that the disk refuses costs the note and nothing else.

    Args:
        most_ids: ids that a subject shall hold; 200 bytes are reserved for each, up to 4 MiB in all.
    """

    def __init__(self, run_dir: Path, most_ids: int) -> None:
        self._room = min(4096 + 208 * most_ids, _LARGEST_SLOT)
        self._slot = 0
        #: What was said last.
        self.at = Stage.WAITING
        self._path = run_dir / _FILE
        self._descriptor = -1
        self.open()

    def open(self) -> None:
        """Begin the file; also again, after somebody has removed it."""
        self.close()
        with contextlib.suppress(OSError):
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            os.posix_fallocate(self._descriptor, 0, _SLOTS_AT + 2 * self._room)
        self.beat()

    def begin(self, step: int, record: RecordRef | None, offsets: bytes, text: bytes) -> None:
        """Name a new subject; `stage` says what happens to it.

        Args:
            offsets: n + 1 int32, where the ids stand in `text` (UTF-8).
        """
        encoded = json.dumps({"step": step, "record": asdict(record) if record else None}).encode()
        numbers = memoryview(offsets).cast("i")
        count = len(numbers) - 1
        room = self._room - _SLOT.size - len(encoded)
        while count and 4 * (count + 1) + numbers[count] - numbers[0] > room:
            count //= 2
        body = b"".join((encoded, numbers[: count + 1], text[numbers[0] : numbers[count]]))
        slot = 1 - self._slot
        head = _SLOT.pack(len(body), zlib.crc32(body), len(encoded), count)
        self._write(head + body, _SLOTS_AT + slot * self._room)
        self._slot = slot

    def stage(self, stage: Stage) -> None:
        """What happens now, to the subject named last; this is a beat too."""
        self.at = stage
        self.beat()

    def beat(self) -> None:
        """Still at it."""
        self._write(_HEADER.pack(_MAGIC, self.at, self._slot, time.monotonic_ns()), 0)

    def close(self) -> None:
        """Close the file; it stays, for the supervisor. Calling it again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes, place: int) -> None:
        if self._descriptor >= 0:
            # A file system that copies on write can be full even here; a note is no reason to end.
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, data, place)


def read_beat(run_dir: Path) -> int | None:
    """The last beat in ns of CLOCK_MONOTONIC; None when there is no file. Cheap."""
    header = _read_header(run_dir)
    return None if header is None else header[2]


def read_doing(run_dir: Path) -> Doing | None:
    """What the sidecar is doing, or was when it died; None when it said nothing, or nothing that can be read."""
    header = _read_header(run_dir)
    if header is None:
        return None
    stage, slot, beat_ns = header
    try:
        content = (run_dir / _FILE).read_bytes()
    except OSError:
        return None
    return Doing(stage, beat_ns, _parse_slot(content, slot))


def forget_doing(run_dir: Path) -> None:
    """Remove the file after a death, so that nobody is blamed twice."""
    # Where it cannot be removed the next sidecar truncates it.
    with contextlib.suppress(OSError):
        (run_dir / _FILE).unlink()


def _read_header(run_dir: Path) -> tuple[Stage, int, int] | None:
    try:
        with (run_dir / _FILE).open("rb") as file:
            magic, stage, slot, beat_ns = _HEADER.unpack(file.read(_HEADER.size))
        return (Stage(stage), slot, beat_ns) if magic == _MAGIC and slot in (0, 1) else None
    except (OSError, struct.error, ValueError):
        return None


def _parse_slot(content: bytes, slot: int) -> Subject | None:
    room = (len(content) - _SLOTS_AT) // 2
    raw = content[_SLOTS_AT + slot * room : _SLOTS_AT + (slot + 1) * room]
    try:
        num_bytes, checksum, json_bytes, count = _SLOT.unpack_from(raw)
        body = raw[_SLOT.size : _SLOT.size + num_bytes]
        if zlib.crc32(body) != checksum:
            return None
        head = json.loads(body[:json_bytes])
        record = RecordRef(**head["record"]) if head["record"] else None
        return Subject(head["step"], record, _parse_ids(body[json_bytes:], count))
    except (struct.error, ValueError, KeyError, TypeError):
        return None


def _parse_ids(raw: bytes, count: int) -> tuple[str, ...]:
    offsets = struct.unpack_from(f"<{count + 1}i", raw)
    text = raw[4 * (count + 1) :]
    bounds = [offset - offsets[0] for offset in offsets]
    return tuple(text[bounds[i] : bounds[i + 1]].decode("utf-8", "replace") for i in range(count))

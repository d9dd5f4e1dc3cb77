"""The journal: every acknowledged record since the last checkpoint, so that a killed sidecar loses none.

    journal/<n>.log    records, appended before their slot is released

    record = 4 s "MPSJ" | u32 header bytes | u64 payload bytes | u32 crc32 of header and payload | header | payload

The header is JSON, the payload the record's bytes as they stood in shared memory (Arrow IPC). A checkpoint says at
which place of which file the first record stands that the model has not had (`position`); a successor reads on from
there. Every life and every checkpoint begin a file; those before the position are deleted once the checkpoint is in
place. What a killed process had begun to append is a torn tail: it was never acknowledged, so it is cut off and the
record is delivered again.

There is no fsync: this guards against the death of the process, not of the machine. After a power cut the run
itself is gone, and its last checkpoint is what remains.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from pathlib import Path
from typing import Any

from mps_trainer.errors import RunError

_log = logging.getLogger(__name__)
_MAGIC = b"MPSJ"
_HEAD = struct.Struct("<4sIQI")


class Journal:
    """Append-only files of records in `folder`: the newest is written, and read up to `position`.

    Args:
        number, place: the position that the checkpoint names; (0, 0) without one.
    """

    def __init__(self, folder: Path, number: int = 0, place: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._reading = number
        self._place = place
        self.drop_before(number)
        older = self._files()
        # A file of one's own, because an older one may end in a torn tail.
        self._number = max(older) + 1 if older else number
        self._descriptor = -1
        self._size = 0
        self._open()

    @property
    def number(self) -> int:
        """The number of the file that is being written."""
        return self._number

    @property
    def position(self) -> tuple[int, int]:
        """Number of the file and place in it, in bytes, of the first record that was not read."""
        return self._reading, self._place

    @property
    def nbytes(self) -> int:
        """Bytes in all its files."""
        return sum(self._path(number).stat().st_size for number in self._files())

    @property
    def unread(self) -> int:
        """Bytes from the position on: 0 when everything has been read."""
        later = [number for number in self._files() if number >= self._reading]
        return sum(self._path(number).stat().st_size for number in later) - self._place

    def append(self, header: dict[str, Any], payload: memoryview | bytes) -> None:
        """Write one record. RunError when it does not fit on the disk; nothing of it is left then."""
        encoded = json.dumps(header, separators=(",", ":")).encode()
        checksum = zlib.crc32(payload, zlib.crc32(encoded))
        head = _HEAD.pack(_MAGIC, len(encoded), len(payload), checksum)
        needed = len(head) + len(encoded) + len(payload)
        try:
            written = os.writev(self._descriptor, [head, encoded, payload])
        except OSError as error:
            written, reason = 0, f": {error.strerror}"
        else:
            reason = ""
        if written != needed:
            os.ftruncate(self._descriptor, self._size)
            raise RunError(
                f"the journal in {self._folder} takes {written} of {needed} bytes{reason}",
                "free space on that disk, or set run_dir to another one",
            )
        self._size += needed

    def read(self) -> tuple[dict[str, Any], memoryview] | None:
        """The next record, oldest first; None when there is no more. A torn tail is cut off."""
        while True:
            record = self._read_here()
            if record is not None or self._reading == self._number:
                return record
            self._reading, self._place = self._reading + 1, 0

    def skip(self) -> None:
        """Count as read what has been appended, because the model had it without reading it here."""
        self._reading, self._place = self._number, self._size

    def begin_next(self) -> int:
        """Start the next file, for what follows the checkpoint that is being taken; its number. Only with all read."""
        self.close()
        self._number += 1
        self._open()
        self.skip()
        return self._number

    def drop_before(self, number: int) -> None:
        """Delete the files that a checkpoint has made superfluous."""
        for found in self._files():
            if found < number:
                self._path(found).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.log"

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path(self._number), flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def _files(self) -> list[int]:
        # Somebody may have put a file beside them: old.log is none of ours.
        return sorted(int(path.stem) for path in self._folder.glob("*.log") if path.stem.isdecimal())

    def _read_here(self) -> tuple[dict[str, Any], memoryview] | None:
        path = self._path(self._reading)
        size = path.stat().st_size if path.exists() else 0
        if self._place >= size:
            return None
        with path.open("rb") as file:
            file.seek(self._place)
            record = _read_record(file.read(_HEAD.size), file.read)
            if record is not None:
                self._place = file.tell()
                return record
        _log.warning("cut a torn tail of %d bytes off %s", size - self._place, path)
        os.truncate(path, self._place)
        if self._reading == self._number:
            self._size = self._place
        return None


def _read_record(head: bytes, read: Any) -> tuple[dict[str, Any], memoryview] | None:
    if len(head) < _HEAD.size:
        return None
    magic, header_bytes, payload_bytes, checksum = _HEAD.unpack(head)
    if magic != _MAGIC:
        return None
    encoded, payload = read(header_bytes), read(payload_bytes)
    if len(payload) != payload_bytes or zlib.crc32(payload, zlib.crc32(encoded)) != checksum:
        return None
    return json.loads(encoded), memoryview(payload)

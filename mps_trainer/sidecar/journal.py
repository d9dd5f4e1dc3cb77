"""The journal: every acknowledged record since the last checkpoint, so that a killed sidecar loses none.

    journal/<n>.log    records, appended before their slot is released; checkpoint k says at which n it ends

    record = 4 s "MPSJ" | u32 header bytes | u64 payload bytes | u32 crc32 of header and payload | header | payload

The header is JSON, the payload the record's bytes as they stood in shared memory (Arrow IPC). A file begins where
a checkpoint was taken; older files are deleted once the checkpoint is in place. What a killed process had begun to
append is a torn tail: it was never acknowledged, so it is cut off and the record is delivered again.

There is no fsync: this guards against the death of the process, not of the machine. After a power cut the run
itself is gone, and its last checkpoint is what remains.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mps_trainer.errors import RunError

_log = logging.getLogger(__name__)
_MAGIC = b"MPSJ"
_HEAD = struct.Struct("<4sIQI")


class Journal:
    """Append-only files of records in `folder`, of which the newest is written."""

    def __init__(self, folder: Path, number: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._number = number
        self._descriptor = -1
        self._size = 0
        self._open()

    @property
    def number(self) -> int:
        """The number of the file that is being written."""
        return self._number

    @property
    def nbytes(self) -> int:
        """Bytes in the file that is being written."""
        return self._size

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

    def begin_next(self) -> int:
        """Start the next file, for what follows the checkpoint that is being taken; its number."""
        self.close()
        self._number += 1
        self._open()
        return self._number

    def drop_before(self, number: int) -> None:
        """Delete the files that a checkpoint has made superfluous."""
        for path in self._folder.glob("*.log"):
            if int(path.stem) < number:
                path.unlink(missing_ok=True)

    def records(self) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """Every whole record of the files from this one's number on, oldest first; a torn tail is cut off."""
        numbers = sorted(int(path.stem) for path in self._folder.glob("*.log"))
        for number in numbers:
            if number >= self._number:
                yield from self._read(self._path(number))
        latest = max([*numbers, self._number])
        if latest != self._number:
            self.close()
            self._number = latest
            self._open()
        self._size = os.fstat(self._descriptor).st_size

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

    def _read(self, path: Path) -> Iterator[tuple[dict[str, Any], memoryview]]:
        size = path.stat().st_size
        place = 0
        with path.open("rb") as file:
            while place < size:
                record = _read_record(file.read(_HEAD.size), file.read)
                if record is None:
                    _log.warning("cut a torn tail of %d bytes off %s", size - place, path)
                    os.truncate(path, place)
                    return
                yield record
                place = file.tell()


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

"""The journal: every acknowledged record since the oldest checkpoint, so that a killed sidecar loses none.

    journal/<n>.log    records, appended before their slot is released

    record = 4 s "MPSJ" | u32 header bytes | u64 payload bytes | u32 crc32 of header and payload | header | payload

The header is JSON, the payload the record's bytes as they stood in shared memory (Arrow IPC). A checkpoint says at
which place of which file the first record stands that the model has not had (`position`); a successor reads on from
there. Every life and every checkpoint begin a file. Those that the oldest checkpoint has had are deleted, so that a
successor which cannot read the newest loses nothing either; what is kept for that alone has a bound in bytes.
What a killed process had begun to append is a torn tail: it was never acknowledged, so it is cut off and the
record is delivered again. Damaged bytes before a whole record, or as long as the record they begin, are no torn tail
but a fault of the disk: they are kept in damaged-<n>-at-<place>.bin for people, and the next whole record follows.

There is no fsync: this guards against the death of the process, not of the machine. After a power cut the run
itself is gone, and its last checkpoint is what remains.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Any

from mps_trainer.errors import RunError
from mps_trainer.run.made_again import is_gone
from mps_trainer.run.private_files import write_private

_log = logging.getLogger(__name__)
_MAGIC = b"MPSJ"
_HEAD = struct.Struct("<4sIQI")
#: For checkpoints before the newest. As much again may come after the newest (`saving._MAX_JOURNAL_BYTES`).
_MAX_OLDER_BYTES = 512 * 2**20
_Record = tuple[dict[str, Any], memoryview]


class Journal:
    """Append-only files of records in `folder`: the newest is written, and read up to `position`.

    Args:
        number, place: the position that the checkpoint names; (0, 0) without one.

    Attributes:
        damaged: stretches of damaged bytes that were skipped over the run so far.
    """

    def __init__(self, folder: Path, number: int = 0, place: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._reading = number
        self._place = place
        self._checkpointed = (number, place)
        self.damaged = len(list(folder.glob("damaged-*.bin")))
        older = self._files()
        if older and number < older[0]:
            _log.error("the journal begins with %d.log, not with %d.log: what lay between is lost", older[0], number)
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
        return sum(map(self._bytes_in, self._files()))

    @property
    def unread(self) -> int:
        """Bytes from the position on: 0 when everything has been read."""
        return self._bytes_from(*self.position)

    @property
    def growth(self) -> int:
        """Bytes that the newest checkpoint lacks."""
        return self._bytes_from(*self._checkpointed)

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

    def read(self) -> _Record | None:
        """The next record, oldest first; None when there is no more. A torn tail is cut off, a damaged one skipped."""
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
        self._number += 1
        try:
            self._open()
        except OSError:
            # What follows goes into the old file.
            self._number -= 1
            raise
        self.skip()
        return self._number

    @property
    def is_in_place(self) -> bool:
        """Whether the file that is written is still there under its name."""
        return not is_gone(self._descriptor, self._path(self._number))

    def begin_again(self) -> bool:
        """After the files were removed: a new one; whether records had not been read. OSError when the disk refuses."""
        lost = self.position != (self._number, self._size)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.begin_next()
        return lost

    def checkpointed(self, position: tuple[int, int], oldest: int) -> None:
        """A checkpoint at `position` is in place, and the oldest one goes on in file `oldest`: delete what none needs.

        What only older ones need is deleted too where it is too much, oldest first.
        """
        self._checkpointed = position
        older = [number for number in self._files() if oldest <= number < position[0]]
        while older and sum(map(self._bytes_in, older)) > _MAX_OLDER_BYTES:
            older.pop(0)
        self.drop_before(min([*older, position[0]]))

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
        descriptor = os.open(self._path(self._number), flags, 0o600)
        self.close()
        self._descriptor = descriptor
        self._size = os.fstat(self._descriptor).st_size

    def _bytes_from(self, number: int, place: int) -> int:
        sizes = {found: self._bytes_in(found) for found in self._files() if found >= number}
        return sum(sizes.values()) - min(place, sizes.get(number, 0))

    def _bytes_in(self, number: int) -> int:
        try:
            return self._path(number).stat().st_size
        except FileNotFoundError:
            # Somebody removes the folder at this moment; whoever looks after it begins again.
            return 0

    def _files(self) -> list[int]:
        # Somebody may have put a file beside them: old.log is none of ours.
        return sorted(int(path.stem) for path in self._folder.glob("*.log") if path.stem.isdecimal())

    def _read_here(self) -> _Record | None:
        path = self._path(self._reading)
        size = self._bytes_in(self._reading)
        if self._place >= size:
            return None
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
            found = _record_at(content, self._place)
            if found is None:
                begin = self._place
                self._place, found = _next_record(content, begin)
                if found is not None or not _is_torn(content[begin : begin + _HEAD.size], size - begin):
                    self._keep_damaged(content[begin : self._place], begin)
                else:
                    self._place = begin
            if found is not None:
                self._place += found[1]
                return found[0]
        if self._place < size:
            _log.warning("cut a torn tail of %d bytes off %s", size - self._place, path)
            os.truncate(path, self._place)
            if self._reading == self._number:
                self._size = self._place
        return None

    def _keep_damaged(self, content: bytes, place: int) -> None:
        aside = self._folder / f"damaged-{self._reading}-at-{place}.bin"
        _log.error(
            "%s: %d damaged bytes (%s) are skipped and kept in %s",
            self._path(self._reading), len(content), _describe(content), aside.name,
        )  # fmt: skip
        # A predecessor may have been here.
        if not aside.exists():
            self.damaged += 1
            try:
                write_private(aside, content)
            except OSError as error:
                _log.error("%s cannot be written: %s", aside.name, error)


def _record_at(content: mmap.mmap, place: int) -> tuple[_Record, int] | None:
    """The whole record at `place` and its bytes in all; None when there is none."""
    head = content[place : place + _HEAD.size]
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        return None
    _, header_bytes, payload_bytes, checksum = _HEAD.unpack(head)
    begin, end = place + _HEAD.size, place + _HEAD.size + header_bytes + payload_bytes
    if end > len(content):
        return None
    encoded, payload = content[begin : begin + header_bytes], content[begin + header_bytes : end]
    if zlib.crc32(payload, zlib.crc32(encoded)) != checksum:
        return None
    return (json.loads(encoded), memoryview(payload)), end - place


def _next_record(content: mmap.mmap, place: int) -> tuple[int, tuple[_Record, int] | None]:
    """Where the next whole record after `place` begins, and that record; the end and None when there is none."""
    while (place := content.find(_MAGIC, place + 1)) >= 0:
        if (found := _record_at(content, place)) is not None:
            return place, found
    return len(content), None


def _is_torn(head: bytes, num_bytes: int) -> bool:
    """Whether `num_bytes` up to a file's end, which begin with `head`, can be the beginning of one longer record."""
    if len(head) < _HEAD.size:
        return head[: len(_MAGIC)] == _MAGIC[: len(head)]
    magic, header_bytes, payload_bytes, _ = _HEAD.unpack(head)
    return bool(magic == _MAGIC and _HEAD.size + header_bytes + payload_bytes > num_bytes)


def _describe(content: bytes) -> str:
    """The record that damaged bytes were, if that can still be read."""
    try:
        _, header_bytes, _, _ = _HEAD.unpack_from(content)
        header = json.loads(content[_HEAD.size : _HEAD.size + header_bytes])
        return f"record {header['seq']} of request {header['request_id']} of {header['channel']}"
    except (struct.error, ValueError, KeyError, TypeError):
        return "whose record cannot be named"

"""A snapshot of the model's weights in shared memory: the sidecar writes it, operators read it.

WeightsWriter.publish   produces snapshot n in buffer n % 2, then makes n the current one; waits for nobody
WeightsReader.look      consumes the current snapshot; waits for nobody

Two buffers: the writer never touches the current snapshot, so one that is killed at any instant leaves it whole, also
for a reader that comes later. A reader that is overtaken (two snapshots while it copied one) sees that the head has
changed, and reads the newer one; the CRC of the bytes is the last word. Tensors are named bytes here: no torch, no
pickle.
"""

from __future__ import annotations

import math
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mps_trainer.errors import CorruptRecordError, TransportError
from mps_trainer.transport import names, weights_file, weights_layout
from mps_trainer.transport.locks import LockFile
from mps_trainer.transport.segment import process_start
from mps_trainer.transport.weights_io import check_time, pieces, read_all, write_all
from mps_trainer.transport.weights_layout import (
    CURRENT,
    LOCK_READER_LIFE,
    LOCK_WRITER_LIFE,
    SnapshotHead,
    WeightsEntry,
    WeightsHeader,
    head_offset,
)

_WORD = struct.Struct("<Q")
#: Times that a reader lets itself be overtaken by the writer before it gives up until the next look.
_TRIES = 4


@dataclass(frozen=True)
class Snapshot:
    """Weights, copied out of shared memory.

    Attributes:
        head: number, model version and times.
        tensors: each with its bytes, in the order of the model's state_dict. They are a buffer of the reader, which it
            uses again at its next look.
    """

    head: SnapshotHead
    tensors: list[tuple[WeightsEntry, memoryview]]


class WeightsWriter:
    """The sidecar's end. One process at a time; it goes on in the file of its predecessor."""

    def __init__(self, run_id: str, entries: Sequence[WeightsEntry]) -> None:
        """Take over the run's file when it holds the same tensors, else make one.

        Raises ShortageError when /dev/shm has no room, with the bytes and what to raise; TransportError when another
        process writes to it; ValueError for an entry that no manifest can hold.
        """
        self._run_id = run_id
        self._entries = weights_layout.check_entries(entries)
        self._number = 0
        file = self._adopt()
        self._file, self._header = file or self._make()

    @property
    def file_bytes(self) -> int:
        """What it takes of /dev/shm."""
        return self._header.file_bytes

    def publish(self, tensors: Iterable[memoryview], *, version: int, trained_ns: int) -> None:
        """Write a snapshot and make it the current one.

        Args:
            tensors: the bytes of each entry, one-dimensional; taken one by one.

        Raises TransportError when the file was removed or damaged and cannot be made again, ValueError when the tensors
        are not those of the entries. Whatever is raised, the snapshot before stays.
        """
        if not self._is_whole():
            # A logout with RemoveIPC, or a hand: nobody could find, or believe, what is written there.
            if not weights_file.is_unlinked(self._file):
                weights_file.unlink(self._run_id)
            file, header = self._make()
            self._file.close()
            self._number, self._file, self._header = 0, file, header
        number, descriptor = self._number + 1, self._file.check_open()
        write_all(descriptor, memoryview(bytes(weights_layout.HEAD_BYTES)), head_offset(number))
        crc = 0
        begin = self._header.buffer_offset(number % 2)
        for entry, offset, raw in zip(self._entries, self._header.offsets, tensors, strict=True):
            if raw.nbytes != entry.nbytes:
                raise ValueError(f"{entry.name} has {raw.nbytes} bytes, its entry says {entry.nbytes}")
            write_all(descriptor, raw, begin + offset)
            crc = zlib.crc32(raw, crc)
        head = SnapshotHead(number, version, trained_ns, time.monotonic_ns(), crc)
        write_all(descriptor, memoryview(head.pack(self._header.generation)), head_offset(number))
        write_all(descriptor, memoryview(_WORD.pack(number)), CURRENT)
        self._number = number

    def close(self) -> None:
        """Leave the file to readers and to a successor. Idempotent."""
        self._file.close()

    def _is_whole(self) -> bool:
        if weights_file.is_unlinked(self._file):
            return False
        try:
            return weights_file.read_weights_header(self._file, self._run_id) == self._header
        except TransportError:
            return False

    def _adopt(self) -> tuple[LockFile, WeightsHeader] | None:
        try:
            file = weights_file.open_weights(self._run_id)
        except FileNotFoundError:
            return None
        try:
            if not file.try_lock(LOCK_WRITER_LIFE):
                raise TransportError(
                    f"another process writes to {weights_file.path_of(self._run_id)}",
                    "stop the other sidecar of this run first",
                )
            try:
                header = weights_file.read_weights_header(file, self._run_id)
                current = _current(file, header)
                if header.entries == self._entries and not weights_file.is_unlinked(file):
                    self._number = current.number if current is not None else 0
                    return file, header
            except TransportError:
                # Whoever made it died amid it, was another version, or somebody wrote into it.
                pass
            # Another model, or nothing that can be read: who has it open sees that its name is gone.
            weights_file.unlink(self._run_id)
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _make(self) -> tuple[LockFile, WeightsHeader]:
        header = WeightsHeader(
            run_id=names.check_run_id(self._run_id),
            generation=secrets.randbits(63) | 1,
            uid=os.geteuid(),
            pid=os.getpid(),
            pid_start=process_start(os.getpid()),
            created_ns=time.time_ns(),
            entries=self._entries,
        )
        try:
            file = weights_file.create_weights(self._run_id)
        except TransportError:
            raise
        except OSError as error:
            path = weights_file.path_of(self._run_id)
            raise TransportError(f"cannot create {path}: {error.strerror}", "make /dev/shm writable") from error
        try:
            if not file.try_lock(LOCK_WRITER_LIFE):
                raise TransportError(f"{weights_file.path_of(self._run_id)} was taken while it was made", "try again")
            weights_file.reserve(file.fd, header)
            static = header.pack()
            write_all(file.fd, memoryview(header.manifest), weights_layout.MANIFEST)
            write_all(file.fd, memoryview(static)[8:], 8)
            write_all(file.fd, memoryview(static)[:8], 0)
        except BaseException:
            weights_file.unlink(self._run_id)
            file.close()
            raise
        return file, header


class WeightsReader:
    """An operator's end. Opens the file when there is one, and again when its name means another one."""

    def __init__(self, run_id: str) -> None:
        self._run_id = names.check_run_id(run_id)
        self._file: LockFile | None = None
        self._header: WeightsHeader | None = None
        self._taken = 0
        self._buffer = bytearray()

    def look(self, deadline: float = math.inf, tries: int = _TRIES) -> Snapshot | None:
        """The current snapshot; None when it was returned before, or when there is none.

        Args:
            deadline: monotonic seconds at which the copying stops.
            tries: how often it lets itself be overtaken by the writer.

        Raises TransportError or CorruptRecordError when the file cannot be used or the time is over; a later look
        tries again.
        """
        if self._file is not None and weights_file.is_unlinked(self._file):
            self.close()
        if self._file is None:
            self._open()
        if self._file is None or self._header is None:
            return None
        size = os.fstat(self._file.fd).st_size
        if size != self._header.file_bytes:
            raise CorruptRecordError(f"{weights_file.path_of(self._run_id)} was cut to {size} bytes")
        for _ in range(tries):
            head = _current(self._file, self._header)
            if head is None or head.number == self._taken:
                return None
            tensors = self._copy(self._file.fd, self._header, head, deadline)
            if tensors is not None:
                self._taken = head.number
                return Snapshot(head, tensors)
        # The writer was faster each time, or what stands there is wrong: the next look will tell.
        raise CorruptRecordError(f"the snapshot of weights in {weights_file.path_of(self._run_id)} does not add up")

    def forget(self) -> None:
        """Let the next look return the current snapshot again."""
        self._taken = 0

    def close(self) -> None:
        """Close the file; the next look opens it again. Idempotent."""
        file, self._file, self._header = self._file, None, None
        self._taken = 0
        self._buffer = bytearray()
        if file is not None:
            file.close()

    def _open(self) -> None:
        try:
            file = weights_file.open_weights(self._run_id)
        except FileNotFoundError:
            return
        try:
            # Not to be had: somebody is about to remove it.
            if file.try_lock(LOCK_READER_LIFE, shared=True) and not weights_file.is_unlinked(file):
                self._header = weights_file.read_weights_header(file, self._run_id)
                self._file = file
        finally:
            if self._file is None:
                file.close()

    def _copy(
        self, descriptor: int, header: WeightsHeader, head: SnapshotHead, deadline: float
    ) -> list[tuple[WeightsEntry, memoryview]] | None:
        """The tensors of a snapshot; None when the writer has overtaken us meanwhile."""
        if len(self._buffer) != header.data_bytes:
            self._buffer = bytearray(header.data_bytes)
        whole = memoryview(self._buffer)
        if not read_all(descriptor, whole, header.buffer_offset(head.number % 2), deadline):
            return None
        tensors, crc = [], 0
        for entry, offset in zip(header.entries, header.offsets, strict=True):
            raw = whole[offset : offset + entry.nbytes]
            for piece, _ in pieces(raw, 0):
                check_time(deadline)
                crc = zlib.crc32(piece, crc)
            tensors.append((entry, raw))
        same = os.pread(descriptor, weights_layout.HEAD_BYTES, head_offset(head.number)) == head.pack(header.generation)
        return tensors if same and crc == head.crc else None


def _current(file: LockFile, header: WeightsHeader) -> SnapshotHead | None:
    """The head of the current snapshot, None before the first; CorruptRecordError when it does not add up."""
    for _ in range(_TRIES):
        (number,) = _WORD.unpack(os.pread(file.check_open(), 8, CURRENT).ljust(8, b"\0"))
        if number == 0:
            return None
        try:
            raw = os.pread(file.fd, weights_layout.HEAD_BYTES, head_offset(number))
            head = weights_layout.unpack_head(raw, header.generation)
        except CorruptRecordError:
            # Two snapshots were published between the two reads, and the third is being written.
            continue
        if head.number == number:
            return head
    raise CorruptRecordError(f"the current snapshot of weights of run {header.run_id} does not add up")

"""A mapped segment of POSIX shared memory with the two locks that prove its users alive.

    object         created by   attached by   removed by                               a SIGKILL leaves
    segment        operator     sidecar       who holds both life locks (see `remove`)  the segment, both locks
                   dropped
    life locks     the kernel drops them with the process                              nothing
    mapping        each side its own; unmapped with the last view after `close`         nothing

The mapping and the locks use two separate open files: a mapping keeps its file open in forked children too,
and a child must not keep its parent's locks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import posix_ipc

from mps_trainer.errors import CorruptRecordError, TransportError
from mps_trainer.transport import layout, names, semaphores, shortage
from mps_trainer.transport.layout import LOCK_OPERATOR_LIFE, LOCK_SIDECAR_LIFE, SegmentHeader
from mps_trainer.transport.locks import LockFile

log = logging.getLogger(__name__)

_MAX_INDEX = 1000


class SideTakenError(TransportError):
    """Another process holds this end of the segment."""


class Segment:
    """A segment, mapped read-write, and the file that holds this side's locks.

    Attributes:
        name: its POSIX name, "/mpst.<run>.<k>".
        header: its static header, read and checked once; later changes of those bytes have no effect here.
        locks: the lock file of this side.
        address, nbytes: where the mapping begins in this process and how long it is, e.g. for `cudaHostRegister`.
        memory: the mapping; `readonly` the same, for what is handed out.
    """

    def __init__(self, name: str, header: SegmentHeader, fd: int, locks: LockFile) -> None:
        self.name = name
        self.header = header
        self.locks = locks
        self.nbytes = header.segment_bytes
        self.inode = os.fstat(fd).st_ino
        # Pages exist since the fallocate; populating them now keeps page faults out of the first batches.
        with shortage.reported(f"map {name}"):
            self.memory = memoryview(mmap.mmap(fd, self.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE))
        self.readonly = self.memory.toreadonly()
        self._before_unmap: list[Callable[[], None]] = []
        self.address = int(np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0])

    @classmethod
    def create(cls, header: SegmentHeader) -> Segment:
        """Make the segment of `header` under the first free index. Its magic is not written yet: see `publish`.

        Raises TransportError when /dev/shm has no room, with the numbers and what to change.
        """
        for index in range(_MAX_INDEX):
            name = names.segment_name(header.run_id, index)
            try:
                fd = _shared_fd(name, posix_ipc.O_CREX)
            except shortage.ShortageError:
                raise
            except posix_ipc.ExistentialError:
                continue
            except (posix_ipc.Error, OSError) as error:
                raise TransportError(f"cannot create {name}: {error}", "make /dev/shm writable") from error
            with contextlib.ExitStack() as undo:
                undo.callback(posix_ipc.unlink_shared_memory, name)
                try:
                    locks = _lock_file(name, fd)
                    undo.callback(locks.close)
                    if not locks.try_lock(LOCK_OPERATOR_LIFE):
                        raise TransportError(f"{name} was taken while it was made", "try again")
                    if not _semaphore_names_free(header.run_id, index):
                        continue
                    _reserve(fd, header, names.SHM_DIR)
                    segment = cls(name, replace(header, index=index), fd, locks)
                finally:
                    os.close(fd)
                undo.pop_all()
                return segment
        raise TransportError(f"run {header.run_id} has {_MAX_INDEX} channels", "run `mps-trainer down`")

    def publish(self) -> None:
        """Write the schema, then the header, then the magic: from now on others may attach."""
        schema, static = self.header.schema, self.header.pack()
        self.memory[layout.SCHEMA : layout.SCHEMA + len(schema)] = schema
        self.memory[8 : len(static)] = static[8:]
        # Two calls, since one orders nothing: stores before and after it may move into the kernel's section and swap
        # there. The end of the first section and the beginning of the second keep the magic behind what it stands for.
        # (An attaching peer checks the CRC anyway.)
        self.locks.try_lock(layout.LOCK_FEED)
        self.locks.unlock(layout.LOCK_FEED)
        self.memory[0:8] = static[:8]

    @classmethod
    def attach(cls, name: str, life: int) -> Segment:
        """Map an existing segment and take the life lock `life` of its side.

        Raises TransportError when it is not ours, of another version, or its side is taken; CorruptRecordError
        when its header does not add up; FileNotFoundError when it is gone.
        """
        fd, locks = open_checked(name)
        try:
            if not locks.try_lock(life):
                raise SideTakenError(
                    f"{name} already has a process at this end", "stop the other sidecar of this run first"
                )
            if os.fstat(fd).st_nlink == 0:
                raise FileNotFoundError(name)
            header = read_header(fd)
            if names.segment_name(header.run_id, header.index) != name:
                # Its semaphores are named by its header: believed, a planted one would cost another run its own.
                raise CorruptRecordError(f"{name} calls itself channel {header.index} of run {header.run_id!r}")
            return cls(name, header, fd, locks)
        except BaseException:
            locks.close()
            raise
        finally:
            os.close(fd)

    def words(self, offset: int, count: int) -> memoryview:
        """`count` 8-byte words at `offset`. Reading or writing one is one aligned machine instruction, never torn."""
        return self.memory[offset : offset + 8 * count].cast("Q")

    def alive(self, life: int) -> bool:
        """Whether the process at the other end holds its life lock."""
        return self.locks.held_elsewhere(life)

    def unlinked_error(self) -> TransportError | None:
        """What to say when the name is gone while we hold the segment, which no rule of ours does; else None."""
        if os.fstat(self.locks.check_open()).st_nlink:
            return None
        return TransportError(
            f"{names.SHM_DIR}{self.name} was removed while this process used it: no sidecar can find it any more",
            "do not clean /dev/shm by hand; if logging out does it (RemoveIPC of systemd), run "
            "`loginctl enable-linger`, then create a new channel",
        )

    def remove(self) -> bool:
        """Remove the segment and its semaphores if nobody else uses them; True when they are gone afterwards."""
        return remove(self.name, self.header.run_id, self.header.index, self.locks)

    def before_unmap(self, call: Callable[[], None]) -> None:
        """Let `close` make this call once, while the mapping and this side's locks are still there."""
        self._before_unmap.append(call)

    def close(self) -> None:
        """Drop the locks and this reference to the mapping, which ends with its last view. Idempotent."""
        # Before the locks too: without our life lock a successor may lend the slots that a device still reads.
        while self._before_unmap:
            self._before_unmap.pop()()
        self.locks.close()
        # Dropped, not closed: unmapped memory under a view is a crash, and `torch.frombuffer` keeps what it is given
        # alive without an export that would make `mmap.close` fail.
        self.memory = self.readonly = memoryview(b"")


def new_header(run_id: str, settings: layout.RingSettings, policy: str, schema: bytes, digest: bytes) -> SegmentHeader:
    """The header of a new segment made by this process; its index is chosen by `Segment.create`."""
    return SegmentHeader(
        run_id=names.check_run_id(run_id),
        index=0,
        generation=secrets.randbits(63) | 1,
        settings=settings,
        policy=policy,
        uid=os.geteuid(),
        pid=os.getpid(),
        pid_start=process_start(os.getpid()),
        created_ns=time.time_ns(),
        schema_hash=digest,
        schema=schema,
    )


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; with the PID it names a process for good. 0 when unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def open_checked(name: str) -> tuple[int, LockFile]:
    """Open a segment twice, for mapping and for locks, after checking that it is a private file of this user."""
    try:
        fd = _shared_fd(name)
    except posix_ipc.ExistentialError as error:
        raise FileNotFoundError(name) from error
    except shortage.ShortageError:
        raise
    except (posix_ipc.Error, OSError, ValueError) as error:
        raise TransportError(f"cannot open {name}: {error}", f"remove {names.SHM_DIR}{name}") from error
    try:
        names.check_private_file(os.fstat(fd), f"{names.SHM_DIR}{name}")
        return fd, _lock_file(name, fd)
    except BaseException:
        os.close(fd)
        raise


def read_header(fd: int) -> SegmentHeader:
    """Read and check the header by `pread`, which cannot fault however short the file is."""
    size = os.fstat(fd).st_size
    raw = os.pread(fd, 16, 0)
    layout.read_version(raw)
    header_bytes = int.from_bytes(raw[12:16], "little")
    if not layout.PAGE <= header_bytes <= 64 * layout.PAGE:
        raise CorruptRecordError(f"the header of the channel claims {header_bytes} bytes")
    return layout.unpack_header(os.pread(fd, header_bytes, 0), size)


def remove(name: str, run_id: str, index: int, locks: LockFile) -> bool:
    """Unlink a segment whose two life locks can be had, semaphores first, so that its name protects theirs.

    `locks` stays open and keeps both locks: a process that opened the file meanwhile finds them taken, then
    `st_nlink` 0.
    """
    if not (locks.try_lock(LOCK_OPERATOR_LIFE) and locks.try_lock(LOCK_SIDECAR_LIFE)):
        return False
    if os.fstat(locks.fd).st_nlink == 0:
        return True
    for semaphore in (names.space_name(run_id, index), names.reply_name(run_id, index)):
        # One of that name that belongs to another user was never this channel's.
        with contextlib.suppress(TransportError):
            semaphores.remove_semaphore(semaphore)
    with contextlib.suppress(posix_ipc.ExistentialError):
        # Gone by hand: nobody who keeps the rule removes what we hold both locks of.
        posix_ipc.unlink_shared_memory(name)
    return True


def _semaphore_names_free(run_id: str, index: int) -> bool:
    # Whoever holds the segment owns the names, but another user may have taken them before.
    try:
        for name in (names.space_name(run_id, index), names.reply_name(run_id, index)):
            semaphores.remove_semaphore(name)
    except TransportError as error:
        log.warning("channel %d of run %s is not used: %s", index, run_id, error)
        return False
    return True


def _lock_file(name: str, fd: int) -> LockFile:
    # A second open file, not a second descriptor of the first one: the mapping shares the first with forked children.
    try:
        second = _shared_fd(name)
    except posix_ipc.ExistentialError as error:
        raise FileNotFoundError(name) from error
    if not os.path.sameopenfile(second, fd):
        os.close(second)
        raise FileNotFoundError(name)
    return LockFile(second)


def _shared_fd(name: str, flags: int = 0) -> int:
    # The object closes nothing by itself: the descriptor is the caller's, without a duplicate that needs one more.
    with shortage.reported(f"open {name}"):
        return int(posix_ipc.SharedMemory(name, flags, mode=0o600).fd)


def _reserve(fd: int, header: SegmentHeader, where: str) -> None:
    # ftruncate would succeed on a full tmpfs and the first write would be a SIGBUS.
    try:
        os.posix_fallocate(fd, 0, header.segment_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
            raise
        room = os.statvfs(where)
        s = header.settings
        raise TransportError(
            f"{where} has {room.f_bavail * room.f_frsize / 2**20:.1f} MiB free, this channel needs "
            f"{header.segment_bytes / 2**20:.1f} MiB (ring_slots={s.num_slots} x ring_slot={s.slot_bytes} bytes, "
            f"and {s.reply_slots} replies): {error.strerror}",
            "lower ring_slots or ring_slot, give the container more (docker --shm-size=1g; Kubernetes: an emptyDir "
            "with medium Memory on /dev/shm), or remove leftovers with `mps-trainer down`",
        ) from error

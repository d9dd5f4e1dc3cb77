"""Locks that the kernel drops when their holder dies, however it dies.

Open-file-description (OFD) byte-range locks belong to an open file, not to a process or a thread:

* they vanish with the last descriptor of that open file, so SIGKILL, an OOM kill or a zombie cannot keep one;
* no bytes in shared memory describe them, so a corrupt peer cannot corrupt a lock;
* `F_OFD_GETLK` asks whether somebody else holds one, without taking it: proof of life without PIDs.

They do not exclude two threads that share the descriptor; `ByteMutex` adds a thread lock for that.

Memory order, as everything in this package relies on it:

* A lock and an unlock of the same byte both go through one kernel spinlock of the inode (`flc_lock`): its release at
  the unlock happens before its acquisition by the next holder. What a process stored before it unlocked is thus
  visible to the process that locks next, on x86-64 and on aarch64.
* x86-64 besides keeps loads in order and stores in order, for all observers (total store order): a reader that sees a
  word sees all that was stored before it, and a slot is seen free only after its reader's loads. (memcpy's streaming
  stores are the exception, and glibc ends them with a store fence.) There, a section that is entered for order alone
  and not for exclusion needs no lock: `TOTAL_STORE_ORDER`. Elsewhere, aarch64 first of all, it takes the lock.
* A successful wait of a POSIX semaphore synchronises with the posts before it (POSIX, "memory synchronization").
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mps_trainer.errors import TransportError
from mps_trainer.transport import names

log = logging.getLogger(__name__)

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid (must be 0 for OFD locks).
_FLOCK = struct.Struct("hhqqi4x")
_GETLK, _SETLK = fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK
TOTAL_STORE_ORDER = platform.machine() == "x86_64"
#: Tries before the first pause: a section under the mutex lasts about two of them.
_TRIES = 20
#: How long to wait for a mutex whose holder keeps it.
MUTEX_S = 0.05


def _request(kind: int, offset: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0)


class LockFile:
    """A descriptor that is used for nothing but locks. Closed in forked children, which must not inherit life."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closing = threading.Event()
        _open_lock_files.add(self)

    def try_lock(self, offset: int, *, shared: bool = False) -> bool:
        """Lock one byte if nobody else holds it. Taking a lock again, or changing its kind, is allowed."""
        return self.lock_by(_request(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, offset))

    def unlock(self, offset: int) -> None:
        """Drop the lock on one byte; without effect when it is not held."""
        self.lock_by(_request(fcntl.F_UNLCK, offset))

    def held_elsewhere(self, offset: int) -> bool:
        """Whether another open file holds a lock on the byte. Locks of this object do not count."""
        reply = fcntl.fcntl(self.check_open(), _GETLK, _request(fcntl.F_WRLCK, offset))
        return bool(_FLOCK.unpack(reply)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the descriptor and with it drop every lock. Idempotent."""
        self.closing.set()
        fd, self.fd = self.fd, -1
        _open_lock_files.discard(self)
        if fd >= 0:
            os.close(fd)

    def lock_by(self, request: bytes) -> bool:
        """Carry out a prepared request; False when somebody else holds the byte."""
        try:
            fcntl.fcntl(self.check_open(), _SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def check_open(self) -> int:
        """The descriptor. Raises TransportError when it is closed here."""
        if self.fd < 0:
            raise TransportError(
                "this channel is closed, or belongs to the process that this one was forked from",
                "open a channel of its own in each process",
            )
        return self.fd


@contextlib.contextmanager
def private_lock_file(path: str | Path) -> Iterator[LockFile | None]:
    """The locks of an object that is there; None when it is gone, or none of this user's own."""
    try:
        file = LockFile(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
    except OSError:
        yield None
        return
    try:
        names.check_private_file(os.fstat(file.fd), str(path))
    except TransportError as error:
        log.debug("left alone: %s", error)
        yield None
    else:
        yield file
    finally:
        file.close()


class ByteMutex:
    """Mutual exclusion between processes and threads by one byte of a lock file.

    Sections under it take microseconds, but a holder may be preempted, or stopped by a debugger: waiting has a limit.
    """

    def __init__(self, file: LockFile, offset: int) -> None:
        self._file = file
        self._lock = _request(fcntl.F_WRLCK, offset)
        self._unlock = _request(fcntl.F_UNLCK, offset)
        self._thread = threading.Lock()
        self._timeout_s = MUTEX_S
        self.timeouts = 0

    def acquire(self) -> bool:
        """Take the mutex within the time limit; False when its holder kept it, which is counted in `timeouts`."""
        if not self._thread.acquire(False) and not self._thread.acquire(timeout=self._timeout_s):
            self.timeouts += 1
            return False
        try:
            fcntl.fcntl(self._file.fd, _SETLK, self._lock)
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            # A closed descriptor: ValueError for the -1 that `close` left.
            self._thread.release()
            self._file.check_open()
            raise
        else:
            return True
        if self._acquire_slowly():
            return True
        self._thread.release()
        self.timeouts += 1
        return False

    def release(self) -> None:
        """Give the mutex back; only its holder may call this."""
        try:
            fcntl.fcntl(self._file.fd, _SETLK, self._unlock)
        finally:
            self._thread.release()

    def _acquire_slowly(self) -> bool:
        # Try and pause, not F_OFD_SETLKW: that has no time limit, and a stopped holder would hang its peer for good.
        if any(self._file.lock_by(self._lock) for _ in range(_TRIES)):
            return True
        deadline = time.monotonic() + self._timeout_s
        delay_s = 50e-6
        while time.monotonic() < deadline:
            self._file.closing.wait(delay_s)
            if self._file.lock_by(self._lock):
                return True
            delay_s = min(2 * delay_s, 1e-3)
        return False


_open_lock_files: set[LockFile] = set()


def _forget_in_child() -> None:
    # A forked child shares the parent's open file: while it lives the parent would look alive.
    for file in list(_open_lock_files):
        fd, file.fd = file.fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)
    _open_lock_files.clear()


os.register_at_fork(after_in_child=_forget_in_child)

"""Locks on files that say whether a process lives.

The kernel drops a lock when its holder dies, whatever killed it and even while it is a zombie; a PID proves
neither (it is reused, and a zombie still answers). So a lock is the proof, and a PID is only for messages.

These are open-file-description locks: unlike a flock they can be tested without being taken, so that a curious
`status` never makes a starting process believe that somebody else holds its lock; unlike plain POSIX locks they
belong to the descriptor, so that a launcher can hand a held lock to the process that it starts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from types import TracebackType

# struct flock: type, whence, start, length (0 = to the end), pid (0 for these locks), padding.
_FLOCK = struct.Struct("@hhqqi4x")


class HeldLock:
    """An exclusive lock, held until `release` or the end of every process that has its descriptor."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def fileno(self) -> int:
        """The descriptor, to be passed on to a child that goes on holding the lock."""
        return self._descriptor

    @classmethod
    def adopt(cls, descriptor: int) -> HeldLock:
        """Go on holding a lock whose descriptor this process inherited; its children do not inherit it."""
        os.set_inheritable(descriptor, False)
        return cls(Path(os.readlink(f"/proc/self/fd/{descriptor}")), descriptor)

    def write_note(self, note: str) -> None:
        """Replace what `holder_note` reads."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, note.encode(), 0)

    def release(self) -> None:
        """Drop the lock, unless a child has its descriptor too. Calling it again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def try_hold(path: Path, note: str = "") -> HeldLock | None:
    """Take the lock at `path` and write `note` into it for `holder_note`; None when another process has it."""
    while True:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            hold_descriptor(descriptor)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        # A clean-up may have removed the file between our open and our lock; then the lock proves nothing.
        if _is_file_of(descriptor, path):
            break
        os.close(descriptor)
    lock = HeldLock(path, descriptor)
    lock.write_note(note)
    return lock


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock at `path`; False when there is no such file."""
    try:
        descriptor = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return is_descriptor_held(descriptor)
    finally:
        os.close(descriptor)


def hold_descriptor(descriptor: int) -> None:
    """Take the lock of an open file of one's own, until it is closed; OSError when another has it."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))


def is_descriptor_held(descriptor: int) -> bool:
    """Whether another opening of this open file holds its lock."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_RDLCK))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def holder_note(path: Path) -> str:
    """What the holder wrote about itself; empty when there is no such file."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _is_file_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

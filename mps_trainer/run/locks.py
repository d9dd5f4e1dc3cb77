"""Locks on files that say whether a process lives.

The kernel drops a flock when its holder dies, whatever killed it and even while it is a zombie; a PID proves
neither (it is reused, and a zombie still answers). So a lock is the proof, and a PID is only for messages.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class HeldLock:
    """An exclusive flock, held until `release` or the end of this process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Drop the lock. Calling it again does nothing."""
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
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, note.encode(), 0)
    return HeldLock(path, descriptor)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock at `path`; False when there is no such file."""
    try:
        descriptor = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def holder_note(path: Path) -> str:
    """What the holder wrote about itself; empty when there is no such file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

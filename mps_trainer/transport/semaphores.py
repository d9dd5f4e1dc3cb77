"""Named POSIX semaphores as wake-up calls. They are never a lock and never the truth.

Who is woken looks at the state words and decides; who is not woken looks by itself after at most `SLICE_S`. So a
count that a killed process left wrong costs at most one look too many, or one slice of waiting.
"""

from __future__ import annotations

import os
import time

import posix_ipc

from mps_trainer.errors import TransportError
from mps_trainer.transport import names
from mps_trainer.transport.locks import LockFile

#: posix_ipc waits on the wall clock: long waits are cut into slices against the monotonic one.
SLICE_S = 1.0
_SEM_T_BYTES = 32
_LIFE, _SIDECAR = 0, 1


class _Semaphore:
    _sem: posix_ipc.Semaphore

    def post(self) -> None:
        """Wake the other side unless a wake-up is already pending.

        Post-if-zero keeps the count small however long nobody waits. It loses no wake-up, because both the change and
        the waiter's last look before sleeping are made under the same `ByteMutex`: a waiter whose look came
        before the change had emptied the semaphore before it, so we see zero here and post.
        """
        if self._sem.value == 0:
            self._sem.release()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until posted, at most `timeout_s` and at most `SLICE_S`. False when the time is over."""
        deadline = time.monotonic() + min(timeout_s, SLICE_S)
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            try:
                self._sem.acquire(remaining_s)
            except posix_ipc.BusyError:
                return False
            except posix_ipc.SignalError:
                if remaining_s == 0.0:
                    return False
                continue
            return True


class WakeUp(_Semaphore):
    """One named semaphore of a channel, opened by both sides."""

    def __init__(self, name: str, *, create: bool) -> None:
        """Create the semaphore (removing a stale one of that name) or open an existing one.

        The caller owns the name: it holds the segment that the name belongs to. Raises TransportError.
        """
        self.name = name
        if create:
            remove_semaphore(name)
        else:
            _check_semaphore_file(name)
        self._sem = _open(name, posix_ipc.O_CREX if create else 0)

    def close(self) -> None:
        """Unmap the semaphore; the name stays."""
        self._sem.close()


class Doorbell(_Semaphore):
    """The semaphore on which the sidecar sleeps. All operators of a run post it; nobody owns it alone.

    Everybody who has it open holds a shared lock on its file; who gets the exclusive lock is alone and may remove it.
    """

    def __init__(self, run_id: str) -> None:
        """Create or open the doorbell of a run. Raises TransportError."""
        self._name = names.bell_name(run_id)
        for _ in range(100):
            if self._open_once():
                return
        raise TransportError(f"doorbell {self._name} is removed again and again", "stop whoever cleans /dev/shm")

    def _open_once(self) -> bool:
        path = names.semaphore_path(self._name)
        self._sem = _open(self._name, posix_ipc.O_CREAT)
        try:
            self._file = LockFile(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        except FileNotFoundError:
            self._sem.close()
            return False
        info = os.fstat(self._file.fd)
        names.check_private_file(info, path)
        self.inode = info.st_ino
        if self._file.try_lock(_LIFE, shared=True) and not self.removed:
            return True
        self.close()
        return False

    def claim(self) -> bool:
        """Become the sidecar of the run; False when another process is."""
        return self._file.try_lock(_SIDECAR)

    @property
    def claimed(self) -> bool:
        """Whether another process is the sidecar of the run, attached to our channel yet or not."""
        return self._file.held_elsewhere(_SIDECAR)

    @property
    def removed(self) -> bool:
        """Whether the name is gone (a clean-up by hand, systemd's RemoveIPC): nobody new can find this bell."""
        return os.fstat(self._file.fd).st_nlink == 0

    def ring_anyway(self) -> None:
        """Wake the sidecar in any case."""
        self._sem.release()

    def close(self, *, unlink_if_alone: bool = False) -> None:
        """Close it, and remove it when nobody else has it open. Idempotent."""
        if self._file.fd < 0:
            return
        if unlink_if_alone and not self.removed and self._file.try_lock(_LIFE):
            remove_semaphore(self._name)
        self._file.close()
        self._sem.close()


def _check_semaphore_file(name: str) -> None:
    # glibc maps whatever it finds: a short file is a SIGBUS at the first operation.
    path = names.semaphore_path(name)
    try:
        info = os.lstat(path)
    except FileNotFoundError as error:
        raise TransportError(f"semaphore {path} is gone", "start the run again") from error
    names.check_private_file(info, path)
    if info.st_size != _SEM_T_BYTES:
        raise TransportError(f"{path} has {info.st_size} bytes and is no semaphore", f"remove {path}")


def _open(name: str, flags: int) -> posix_ipc.Semaphore:
    if flags == posix_ipc.O_CREAT and os.path.lexists(names.semaphore_path(name)):
        _check_semaphore_file(name)
    try:
        return posix_ipc.Semaphore(name, flags, mode=0o600, initial_value=0)
    except (posix_ipc.Error, OSError) as error:
        raise TransportError(
            f"cannot open semaphore {names.semaphore_path(name)}: {error}",
            "check that /dev/shm is writable and has room, and that the name is not another user's",
        ) from error


def remove_semaphore(name: str) -> bool:
    """Unlink a semaphore that the caller owns by rule; False when it is gone already."""
    try:
        posix_ipc.unlink_semaphore(name)
    except posix_ipc.ExistentialError:
        return False
    return True

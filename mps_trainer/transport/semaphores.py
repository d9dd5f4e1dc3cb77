"""Named POSIX semaphores as wake-up calls. They are never a lock and never the truth.

One post for every record that is committed, one taken back for every record that is claimed or evicted without waiting:
so the count stays near the number of records, however long nobody sleeps. A reader looks at the state words after
every wait and before the next one, so a record that its last look missed has a post that is still pending, and no
wake-up is lost. A count that a killed process left wrong costs one look too many, or a wait of at most `SLICE_S`.
"""

from __future__ import annotations

import os
import time

import posix_ipc

from mps_trainer.errors import TransportError
from mps_trainer.transport import names, shortage
from mps_trainer.transport.locks import LockFile

#: posix_ipc waits on the wall clock: long waits are cut into slices against the monotonic one.
SLICE_S = 1.0
#: How long to look for a post before going to sleep. A sleep and its wake-up cost the waiter about 6 us, so whoever
#: answers within this time is heard sooner. It is spent once for each wait: by an idle
#: reader 50 us a second in waits of `SLICE_S`, 200 us a second in those of 0.25 s, as the sidecar's loop makes them.
LOOK_NS = 50_000
#: How long to try for the doorbell while a peer removes it.
OPEN_S = 1.0
_SEM_T_BYTES = 32
_LIFE, _SIDECAR = 0, 1


class _Semaphore:
    _sem: posix_ipc.Semaphore

    def post(self) -> None:
        """Wake the other side, now or at its next wait."""
        self._sem.release()

    def consume(self) -> None:
        """Take back one post, if there is one: what it announced has been taken without waiting for it."""
        if self._sem.value:
            try:  # noqa: SIM105  # on the way of every record, where suppress() costs more than all the rest
                self._sem.acquire(0)
            except posix_ipc.BusyError:
                pass

    def wait(self, timeout_s: float) -> bool:
        """Sleep until posted, at most `timeout_s` and at most `SLICE_S`. False when the time is over."""
        deadline = time.monotonic() + min(timeout_s, SLICE_S)
        if timeout_s > 0 and self._comes_at_once():
            return True
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

    def _comes_at_once(self) -> bool:
        """Look for a post for `LOOK_NS`, and take it."""
        sem, clock = self._sem, time.perf_counter_ns
        until = clock() + LOOK_NS
        while clock() < until:
            if sem.value:
                try:
                    sem.acquire(0)
                except posix_ipc.BusyError:
                    continue
                return True
            # Where both sides share a core, whoever would post needs it.
            os.sched_yield()
        return False


class WakeUp(_Semaphore):
    """One named semaphore of a channel, opened by both sides."""

    def __init__(self, name: str, *, create: bool) -> None:
        """Create the semaphore (removing a stale one of that name) or open an existing one.

        The caller owns the name: it holds the segment that the name belongs to. Raises TransportError.
        """
        self.name = name
        self._is_open = False
        if create:
            remove_semaphore(name)
        else:
            _check_semaphore_file(name)
        self._sem = _open(name, posix_ipc.O_CREX if create else 0)
        self._is_open = True

    def close(self) -> None:
        """Unmap the semaphore; the name stays. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._sem.close()

    def __del__(self) -> None:
        # posix_ipc unmaps nothing by itself: a channel that failed half-way would hold the page until its process ends.
        self.close()


class Doorbell(_Semaphore):
    """The semaphore on which the sidecar sleeps. All operators of a run post it; nobody owns it alone.

    Everybody who has it open holds a shared lock on its file; who gets the exclusive lock is alone and may remove it.
    """

    def __init__(self, run_id: str) -> None:
        """Create or open the doorbell of a run. Raises TransportError."""
        self._name = names.bell_name(run_id)
        self._path = names.semaphore_path(self._name)
        deadline = time.monotonic() + OPEN_S
        pause_s = 50e-6
        while not self._open_once():
            if time.monotonic() >= deadline:
                raise TransportError(
                    f"doorbell {self._path} cannot be had within {OPEN_S:g} s: a process that removes it holds "
                    "its lock (it is stopped half-way), or somebody removes it again and again",
                    f"resume or end that process (`fuser {self._path}`), and stop whoever cleans {names.SHM_DIR}",
                )
            # The kernel tells nobody when a lock is dropped, and waiting for the lock itself has no time limit.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 10e-3)

    def _open_once(self) -> bool:
        # Made where there is none, opened only below: until we hold the lock the name may come to mean another bell.
        _open(self._name, posix_ipc.O_CREAT).close()
        try:
            with shortage.reported(f"open {self._path}"):
                self._file = LockFile(os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        except FileNotFoundError:
            return False
        try:
            info = os.fstat(self._file.fd)
            names.check_private_file(info, self._path)
            self.inode = info.st_ino
            if self._file.try_lock(_LIFE, shared=True):
                self._sem = _open(self._name, posix_ipc.O_CREAT)
                if not self.removed:
                    return True
                self._sem.close()
        except BaseException:
            self._file.close()
            raise
        self._file.close()
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
        return os.fstat(self._file.check_open()).st_nlink == 0

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
        with shortage.reported(f"open semaphore {names.semaphore_path(name)}"):
            return posix_ipc.Semaphore(name, flags, mode=0o600, initial_value=0)
    except shortage.ShortageError:
        raise
    except (posix_ipc.Error, OSError) as error:
        raise TransportError(
            f"cannot open semaphore {names.semaphore_path(name)}: {error}",
            "check that /dev/shm is writable and has room, and that the name is not another user's",
        ) from error


def remove_semaphore(name: str) -> bool:
    """Unlink a semaphore that the caller owns by rule; False when it is gone already.

    Raises TransportError when the name is in another user's hands.
    """
    try:
        posix_ipc.unlink_semaphore(name)
    except posix_ipc.ExistentialError:
        return False
    except (posix_ipc.Error, OSError) as error:
        path = names.semaphore_path(name)
        raise TransportError(
            f"cannot remove {path}: {error}", "ask its owner (`ls -l`) or root to remove it"
        ) from error
    return True

"""Shortages that pass: descriptors, memory, room in /dev/shm. Who meets one tries again later and refuses nothing."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
from collections.abc import Iterator

from mps_trainer.errors import TransportError

log = logging.getLogger(__name__)

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)


class ShortageError(TransportError):
    """Something could not be opened or made for want of descriptors, memory or room; later it may be possible.

    Attributes:
        of_room: whether removing things from /dev/shm would help.
    """

    of_room = False


@contextlib.contextmanager
def reported(doing: str, where: str = "/dev/shm") -> Iterator[None]:
    """Turn an OSError that means a shortage into a ShortageError "cannot `doing`: ..."; let others pass."""
    try:
        yield
    except TransportError:
        raise
    except OSError as error:
        # posix_ipc raises OSError without a number for too many open files, and with one for everything else.
        number = error.errno or errno.EMFILE
        if number not in _PASSING:
            raise
        raise _described(number, doing, where) from error


def _described(number: int, doing: str, where: str) -> ShortageError:
    if number in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return ShortageError(
            f"cannot {doing}: {os.strerror(number)} (the limit of this process is {limit})",
            "raise it (`ulimit -n`; docker --ulimit nofile=65536; system-wide fs.file-max), or close files",
        )
    if number == errno.ENOMEM:
        return ShortageError(f"cannot {doing}: {os.strerror(number)}", "raise the memory or address-space limit")
    room = os.statvfs(where)
    error = ShortageError(
        f"cannot {doing}: {where} has {room.f_bavail * room.f_frsize / 2**20:.1f} MiB of "
        f"{room.f_blocks * room.f_frsize / 2**20:.1f} MiB and {room.f_ffree} of {room.f_files} files free: "
        f"{os.strerror(number)}",
        "give the container more (docker --shm-size=1g; Kubernetes: an emptyDir with medium Memory on /dev/shm; "
        f"`mount -o remount,size=...,nr_inodes=... {where}`), or remove leftovers with `mps-trainer down`",
    )
    error.of_room = True
    return error


class Shortages:
    """Counts the shortages that a process met, and says so once for each spell of them.

    Attributes:
        count: how many attempts a shortage has stopped.
    """

    def __init__(self) -> None:
        self.count = 0
        self._said = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """One look at everything. A shortage in it is noted and not raised; a look without one ends the spell."""
        before = self.count
        try:
            yield
        except ShortageError as error:
            self.note(error)
        if self.count == before and self._said:
            self._said = False
            log.warning("the shortage is over")

    def note(self, error: ShortageError) -> None:
        """Count it, and log the first of a spell."""
        self.count += 1
        if not self._said:
            self._said = True
            log.warning("%s; tried again each second", error)

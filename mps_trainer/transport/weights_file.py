"""The file in /dev/shm that holds a run's snapshot of weights: who opens it, and who may remove it.

    lock     held by                       meaning
    byte 0   operators, shared, for life   somebody reads it
    byte 1   sidecar, for life             somebody writes it

Whoever holds both bytes may remove it; one without a valid header only when it was not written to for a while, since
its maker may be about to finish it. It is read and written by `pread` and `pwrite` and never mapped, so that
a file that somebody cuts short is an error and no SIGBUS. Imports nothing heavy: the launcher uses it too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator

from mps_trainer.errors import CorruptRecordError, TransportError
from mps_trainer.transport import names, shortage, weights_layout
from mps_trainer.transport.locks import LockFile
from mps_trainer.transport.weights_layout import LOCK_READER_LIFE, LOCK_WRITER_LIFE, WeightsHeader

log = logging.getLogger(__name__)
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def path_of(run_id: str) -> str:
    """Its file."""
    return f"{names.SHM_DIR}{names.weights_name(names.check_run_id(run_id))}"


def open_weights(run_id: str) -> LockFile:
    """Open the file of a run, which is also what its locks are on.

    Raises FileNotFoundError when there is none, TransportError when it is no private file of this user.
    """
    path = path_of(run_id)
    try:
        with shortage.reported(f"open {path}"):
            file = LockFile(os.open(path, _FLAGS))
    except (FileNotFoundError, TransportError):
        raise
    except OSError as error:
        raise TransportError(f"cannot open {path}: {error.strerror}", f"remove {path}") from error
    try:
        names.check_private_file(os.fstat(file.fd), path)
    except BaseException:
        file.close()
        raise
    return file


def create_weights(run_id: str) -> LockFile:
    """Make an empty file; FileExistsError when there is one."""
    path = path_of(run_id)
    with shortage.reported(f"create {path}"):
        return LockFile(os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600))


def read_weights_header(file: LockFile, run_id: str) -> WeightsHeader:
    """Read and check the header; CorruptRecordError or TransportError when nobody should believe it."""
    size = os.fstat(file.check_open()).st_size
    static = os.pread(file.fd, weights_layout.STATIC_BYTES, 0)
    count = weights_layout.manifest_bytes_of(static)
    raw = os.pread(file.fd, weights_layout.MANIFEST + count, 0)
    header = weights_layout.unpack_weights_header(raw, size)
    if header.run_id != run_id:
        raise CorruptRecordError(f"the snapshot of weights of run {run_id} says that it is of run {header.run_id!r}")
    return header


def is_removable(run_id: str, unfinished_s: float) -> bool:
    """Whether the file of a run is there and nobody uses it."""
    with _ours(run_id) as file:
        return file is not None and not _in_use(file) and _is_settled(file, run_id, unfinished_s)


def is_used(run_id: str) -> bool:
    """Whether a living process reads or writes the file of a run."""
    with _ours(run_id) as file:
        return file is not None and _in_use(file)


def remove_weights(run_id: str, unfinished_s: float) -> bool:
    """Remove the file of a run if nobody uses it; whether it was removed.

    Args:
        unfinished_s: one without a valid header stays for so many seconds after it was last written.
    """
    with _ours(run_id) as file:
        if file is None or _in_use(file) or not _is_settled(file, run_id, unfinished_s):
            return False
        # Kept until the file is closed: who opened it meanwhile finds them taken, then `st_nlink` 0.
        if not (file.try_lock(LOCK_READER_LIFE) and file.try_lock(LOCK_WRITER_LIFE)) or is_unlinked(file):
            return False
        unlink(run_id)
        return True


def unlink(run_id: str) -> None:
    """Remove the name, which is the right of whoever holds the locks."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path_of(run_id))


def is_unlinked(file: LockFile) -> bool:
    """Whether the name does not mean this file any more."""
    return os.fstat(file.check_open()).st_nlink == 0


@contextlib.contextmanager
def _ours(run_id: str) -> Iterator[LockFile | None]:
    try:
        file = open_weights(run_id)
    except FileNotFoundError:
        yield None
        return
    except TransportError as error:
        log.debug("left alone: %s", error)
        yield None
        return
    try:
        yield file
    finally:
        file.close()


def _in_use(file: LockFile) -> bool:
    return file.held_elsewhere(LOCK_READER_LIFE) or file.held_elsewhere(LOCK_WRITER_LIFE)


def _is_settled(file: LockFile, run_id: str, unfinished_s: float) -> bool:
    try:
        read_weights_header(file, run_id)
    except TransportError:
        return time.time() - os.fstat(file.fd).st_mtime >= unfinished_s
    return True


def reserve(descriptor: int, header: WeightsHeader) -> None:
    """Take the room for the whole file, or raise a ShortageError `of_room` that says how much is missing."""
    # ftruncate would succeed on a full tmpfs, and a snapshot would find no room in the middle of a run.
    try:
        os.posix_fallocate(descriptor, 0, header.file_bytes)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        room = os.statvfs(names.SHM_DIR)
        found = shortage.ShortageError(
            f"{names.SHM_DIR} has {room.f_bavail * room.f_frsize} bytes free, score_where: operator needs "
            f"{header.file_bytes} bytes ({header.file_bytes / 2**20:.1f} MiB: twice the model's weights): "
            f"{error.strerror}",
            "give the container more (docker --shm-size=1g or more; Kubernetes: an emptyDir with medium Memory on "
            "/dev/shm), remove leftovers with `mps-trainer down`, or use score_where: sidecar",
        )
        found.of_room = True
        raise found from error

"""Objects of ours in /dev/shm, one by one: whose each is, whether it is free, why it is not, and its removal.

Names, layout and locks are the transport's own. Its sweep is not called here because it brings numpy, and a
supervisor has to stay small; a test compares the two on the same objects.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.errors import TransportError
from mps_trainer.transport import layout, names, weights_file
from mps_trainer.transport.locks import LockFile, private_lock_file

SHM = Path(names.SHM_DIR)
#: Younger than this, an operator may just be making its channel, and has not locked it yet.
UNFINISHED_SECONDS = 60.0
_BELL, _WEIGHTS = -1, -2
_LARGEST_HEADER = 64 * layout.PAGE
_LIFE_LOCKS = (layout.LOCK_OPERATOR_LIFE, layout.LOCK_SIDECAR_LIFE)


@dataclass(frozen=True)
class ShmObject:
    """A segment, a semaphore or a snapshot of weights of this user's own.

    Attributes:
        channel: negative for what the whole run shares: the doorbell, the snapshot of its model's weights.
    """

    run_id: str
    path: Path
    channel: int
    is_segment: bool

    @property
    def segment(self) -> Path:
        """The segment that it belongs to."""
        return SHM / names.segment_name(self.run_id, self.channel).lstrip("/")

    @property
    def num_bytes(self) -> int:
        """Its size; 0 when it is gone."""
        try:
            return self.path.lstat().st_size
        except FileNotFoundError:
            return 0

    @property
    def made(self) -> float:
        """When it was made, in seconds since the epoch; now when it is gone."""
        try:
            return self.path.lstat().st_mtime
        except FileNotFoundError:
            return time.time()


def shm_objects() -> list[ShmObject]:
    """Objects of ours, segments first: they take their semaphores along."""
    found = []
    for entry in names.entries():
        path = SHM / entry
        with contextlib.suppress(FileNotFoundError, TransportError):
            if segment := names.parse_segment(entry):
                names.check_private_file(path.lstat(), entry)
                found.append(ShmObject(segment[0], path, segment[1], True))
            elif semaphore := names.parse_semaphore(entry):
                names.check_private_file(path.lstat(), entry)
                channel = _BELL if semaphore[1] == "bell" else int(semaphore[1].partition(".")[0])
                found.append(ShmObject(semaphore[0], path, channel, False))
            elif run_id := names.parse_weights(entry):
                names.check_private_file(path.lstat(), entry)
                found.append(ShmObject(run_id, path, _WEIGHTS, False))
    return sorted(found, key=lambda item: not item.is_segment)


def is_bell_in_use(run_id: str) -> bool:
    """Whether a process has the doorbell of the run open: it works for the run."""
    with private_lock_file(names.semaphore_path(names.bell_name(run_id))) as file:
        return file is not None and file.held_elsewhere(0)


def is_free(item: ShmObject) -> bool:
    """Whether nobody uses it, nor can just be making it."""
    if item.channel == _WEIGHTS:
        return weights_file.is_removable(item.run_id, UNFINISHED_SECONDS)
    if item.is_segment:
        with private_lock_file(item.path) as file:
            return file is not None and _is_segment_free(file, item.run_id)
    if item.channel == _BELL:
        return not is_bell_in_use(item.run_id)
    if item.segment.exists():
        with private_lock_file(item.segment) as file:
            return file is not None and _is_segment_free(file, item.run_id)
    return time.time() - item.made > UNFINISHED_SECONDS


def is_used(item: ShmObject) -> bool:
    """Whether a living process holds one of the life locks of the segment, or of the one that it belongs to."""
    if item.channel == _WEIGHTS:
        return weights_file.is_used(item.run_id)
    with private_lock_file(item.path if item.is_segment else item.segment) as file:
        return file is not None and any(file.held_elsewhere(lock) for lock in _LIFE_LOCKS)


def operators_of(run_id: str) -> list[int]:
    """PIDs of the operators that hold a segment of the run, for messages only."""
    found = set()
    for index in names.segment_indices(run_id):
        with private_lock_file(SHM / names.segment_name(run_id, index).lstrip("/")) as file:
            if file is None or not file.held_elsewhere(layout.LOCK_OPERATOR_LIFE):
                continue
            with contextlib.suppress(TransportError):
                found.add(_read_header(file.fd).pid)
    return sorted(found)


def remove_object(item: ShmObject) -> None:
    """Remove it when it is free; semaphores of a channel go with their segment."""
    if item.channel == _WEIGHTS:
        weights_file.remove_weights(item.run_id, UNFINISHED_SECONDS)
        return
    if not item.is_segment and item.channel != _BELL:
        if not item.segment.exists() and time.time() - item.made > UNFINISHED_SECONDS:
            item.path.unlink(missing_ok=True)
        return
    with private_lock_file(item.path) as file:
        if file is None or (item.is_segment and not _is_segment_free(file, item.run_id)):
            return
        if not all(file.try_lock(lock) for lock in (_LIFE_LOCKS if item.is_segment else (0,))):
            return
        if os.fstat(file.fd).st_nlink == 0:
            return
        if item.is_segment:
            for name in (names.space_name, names.reply_name):
                Path(names.semaphore_path(name(item.run_id, item.channel))).unlink(missing_ok=True)
        item.path.unlink(missing_ok=True)


def _is_segment_free(file: LockFile, run_id: str) -> bool:
    if any(file.held_elsewhere(lock) for lock in _LIFE_LOCKS):
        return False
    return _is_finished(file.fd, run_id) or time.time() - os.fstat(file.fd).st_mtime > UNFINISHED_SECONDS


def _is_finished(descriptor: int, run_id: str) -> bool:
    """Whether a segment has a valid header of its run."""
    try:
        return _read_header(descriptor).run_id == run_id
    except TransportError:
        return False


def _read_header(descriptor: int) -> layout.SegmentHeader:
    return layout.unpack_header(os.pread(descriptor, _LARGEST_HEADER, 0), os.fstat(descriptor).st_size)

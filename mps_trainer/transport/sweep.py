"""Finding and removing what dead processes left in /dev/shm. The rule is the locks, never a PID and never age alone.

    a segment is removed      when both of its life locks can be had: no operator and no sidecar uses it
    an unfinished segment     the same, and only a minute after it was last written: its maker may be about to lock it
    a channel's semaphores    before their segment; alone, only when their segment is gone for a minute
    a doorbell                when nobody has it open
    a snapshot of weights     like a segment (`weights_file`)
    anything, by a sweep      only when nobody has the run's doorbell open, whatever the caller believes of the run
Nothing that belongs to another user, is not a private regular file, or does not carry our names is ever opened
for writing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable

from mps_trainer.errors import CorruptRecordError, TransportError
from mps_trainer.transport import layout, names, weights_file
from mps_trainer.transport.counters import dropped_rows
from mps_trainer.transport.locks import private_lock_file
from mps_trainer.transport.segment import Segment, open_checked, read_header, remove
from mps_trainer.transport.semaphores import remove_semaphore
from mps_trainer.transport.shortage import ShortageError

log = logging.getLogger(__name__)

#: An object without a valid header, or without its segment, is left alone for this long.
UNFINISHED_S = 60.0
#: Undrained channels of dead operators that wait for a sidecar; a crash loop of operators must not fill /dev/shm.
KEEP_ORPHANS = 2


def sweep_stale(is_run_alive: Callable[[str], bool]) -> list[str]:
    """Remove what dead runs left. `is_run_alive(run_id)` is asked once a run; a lock that is held overrules a no.

    Returns the removed entries of /dev/shm.
    """
    verdicts: dict[str, bool] = {}
    removed: list[str] = []
    for entry in names.entries():
        run = names.run_of(entry)
        if run is not None and run not in verdicts:
            verdicts[run] = is_run_alive(run)
    for run_id, alive in verdicts.items():
        # The caller knows the runs of its own state folder only; a process that has the doorbell open proves another's.
        if not alive and not _bell_in_use(run_id):
            removed += remove_run(run_id)
    return removed


def remove_run(run_id: str) -> list[str]:
    """Remove every segment, semaphore and snapshot of a run that no process uses, with records or not; which."""
    before = set(names.leftovers(run_id))
    for index in names.segment_indices(run_id):
        _remove_dead(run_id, index, lambda records: True)
    weights_file.remove_weights(run_id, UNFINISHED_S)
    for entry in before:
        hit = names.parse_semaphore(entry)
        if hit is None:
            continue
        if hit[1] == "bell":
            _remove_bell(run_id)
        else:
            _remove_lone_semaphore(entry, run_id, int(hit[1][:-2]))
    return sorted(before - set(names.leftovers(run_id)))


def reclaim_orphans(run_id: str, keep: int = KEEP_ORPHANS) -> int:
    """Remove channels of a living run whose operator died with no sidecar attached; returns how many.

    Drained ones go at once. Of those that hold records, or whose drops no sidecar may have counted yet, the newest
    `keep` stay for the next sidecar.
    """
    kept = removed = 0

    def wanted(left: int) -> bool:
        nonlocal kept
        kept += left > 0
        return left == 0 or kept > keep

    for index in reversed(names.segment_indices(run_id)):
        removed += _remove_dead(run_id, index, wanted)
    return removed


def create_segment(header: layout.SegmentHeader) -> Segment:
    """`Segment.create`, with what dead operators of the run left removed first, all of it where /dev/shm is full."""
    reclaim_orphans(header.run_id)
    try:
        return Segment.create(header)
    except TransportError as error:
        if isinstance(error, ShortageError) and not error.of_room:
            raise
        # Unread records of dead operators are worth less than a living operator's channel.
        if not reclaim_orphans(header.run_id, keep=0):
            raise
    return Segment.create(header)


def _remove_dead(run_id: str, index: int, wanted: Callable[[int], bool]) -> bool:
    name = names.segment_name(run_id, index)
    with contextlib.ExitStack() as stack:
        try:
            fd, locks = open_checked(name)
        except FileNotFoundError:
            return False
        except TransportError as error:
            log.debug("left alone: %s", error)
            return False
        stack.callback(os.close, fd)
        stack.callback(locks.close)
        if locks.held_elsewhere(layout.LOCK_OPERATOR_LIFE) or locks.held_elsewhere(layout.LOCK_SIDECAR_LIFE):
            return False
        records = _count_records(fd, run_id)
        if records is None:
            if time.time() - os.fstat(fd).st_mtime < UNFINISHED_S:
                return False
            records = left = 0
        else:
            left = records + dropped_rows(fd)
        if not wanted(left) or not remove(name, run_id, index, locks):
            return False
        if records:
            log.warning("removed %s of a dead operator with %d unread records", name, records)
        return True


def _count_records(fd: int, run_id: str) -> int | None:
    """Records in the feed of a segment; None when it has no valid header of this run."""
    try:
        header = read_header(fd)
    except (CorruptRecordError, TransportError):
        return None
    if header.run_id != run_id:
        return None
    raw = os.pread(fd, 8 * header.settings.num_slots, layout.FEED_STATES)
    return sum(raw[i] & 3 != 0 for i in range(0, len(raw), 8))


def _remove_bell(run_id: str) -> None:
    with private_lock_file(_bell_path(run_id)) as file:
        if file is not None and file.try_lock(0) and os.fstat(file.fd).st_nlink:
            remove_semaphore(names.bell_name(run_id))


def _bell_in_use(run_id: str) -> bool:
    with private_lock_file(_bell_path(run_id)) as file:
        return file is not None and file.held_elsewhere(0)


def _bell_path(run_id: str) -> str:
    return names.semaphore_path(names.bell_name(run_id))


def _remove_lone_semaphore(entry: str, run_id: str, index: int) -> None:
    path = f"{names.SHM_DIR}/{entry}"
    with contextlib.suppress(FileNotFoundError, TransportError):
        info = os.lstat(path)
        names.check_private_file(info, path)
        if index not in names.segment_indices(run_id) and time.time() - info.st_mtime > UNFINISHED_S:
            remove_semaphore("/" + entry.removeprefix("sem."))

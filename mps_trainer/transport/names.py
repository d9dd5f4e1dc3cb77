"""Names of the objects that outlive a process, and who may remove them.

A run called `r` owns, in /dev/shm:

    mpst.r.<k>        segment of channel k      created by an operator
    sem.mpst.r.<k>.s  "a feed slot is free"     created by the same operator, removed before the segment
    sem.mpst.r.<k>.r  "a reply is there"        the same
    sem.mpst.r.bell   doorbell of the sidecar   created by whoever comes first, removed by whoever leaves last
    mpst.r.w          snapshot of the weights   created by the sidecar, removed like a segment (`weights_file`)

Only a process that holds both life locks of a segment removes it, so a name always means one segment.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat

from mps_trainer.errors import TransportError
from mps_trainer.transport import shortage

SHM_DIR = "/dev/shm"
PREFIX = "mpst."
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,23}")
_SEGMENT = re.compile(r"mpst\.([A-Za-z0-9][A-Za-z0-9_-]{0,23})\.([0-9]{1,4})")
_WEIGHTS = re.compile(r"mpst\.([A-Za-z0-9][A-Za-z0-9_-]{0,23})\.w")
_SEMAPHORE = re.compile(r"sem\.mpst\.([A-Za-z0-9][A-Za-z0-9_-]{0,23})\.(bell|[0-9]{1,4}\.[rs])")


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it may be part of a name in /dev/shm, else raise `TransportError`."""
    if not _RUN_ID.fullmatch(run_id):
        raise TransportError(
            f"run id {run_id!r} cannot name shared memory",
            "use 1 to 24 letters, digits, '-' or '_', beginning with a letter or digit",
        )
    return run_id


def segment_name(run_id: str, index: int) -> str:
    """POSIX name of the segment of channel `index`."""
    return f"/{PREFIX}{run_id}.{index}"


def weights_name(run_id: str) -> str:
    """POSIX name of the snapshot of the model's weights."""
    return f"/{PREFIX}{run_id}.w"


def space_name(run_id: str, index: int) -> str:
    """POSIX name of the semaphore that says that a feed slot became free."""
    return f"/{PREFIX}{run_id}.{index}.s"


def reply_name(run_id: str, index: int) -> str:
    """POSIX name of the semaphore that says that a reply arrived."""
    return f"/{PREFIX}{run_id}.{index}.r"


def bell_name(run_id: str) -> str:
    """POSIX name of the doorbell that all operators of a run ring."""
    return f"/{PREFIX}{run_id}.bell"


def semaphore_path(name: str) -> str:
    """The file behind a POSIX semaphore; glibc and musl both put it there."""
    return f"{SHM_DIR}/sem.{name.lstrip('/')}"


def parse_segment(entry: str) -> tuple[str, int] | None:
    """(run id, channel index) of an entry of /dev/shm, or None when it is no segment of ours."""
    match = _SEGMENT.fullmatch(entry)
    return (match[1], int(match[2])) if match else None


def parse_weights(entry: str) -> str | None:
    """Run id of an entry of /dev/shm, or None when it is no snapshot of weights of ours."""
    match = _WEIGHTS.fullmatch(entry)
    return match[1] if match else None


def run_of(entry: str) -> str | None:
    """Run id of an entry of /dev/shm, or None when it is none of ours."""
    hit = parse_segment(entry) or parse_semaphore(entry)
    return hit[0] if hit else parse_weights(entry)


def parse_semaphore(entry: str) -> tuple[str, str] | None:
    """(run id, "bell" or "<k>.r" or "<k>.s") of an entry of /dev/shm, or None."""
    match = _SEMAPHORE.fullmatch(entry)
    return (match[1], match[2]) if match else None


def entries() -> list[str]:
    """All entries of /dev/shm that carry our prefix, sorted. Raises ShortageError."""
    with shortage.reported(f"list {SHM_DIR}"):
        present = os.listdir(SHM_DIR)
    return sorted(e for e in present if e.startswith((PREFIX, f"sem.{PREFIX}")))


def segment_indices(run_id: str) -> list[int]:
    """Channel indices of a run that have a segment, ascending."""
    found = (parse_segment(e) for e in entries())
    return sorted(hit[1] for hit in found if hit and hit[0] == run_id)


def segments(run_id: str) -> list[tuple[str, int]]:
    """(POSIX name, inode) of the segments of a run, by index."""
    found = []
    for index in segment_indices(run_id):
        name = segment_name(run_id, index)
        with contextlib.suppress(FileNotFoundError):
            found.append((name, os.lstat(f"{SHM_DIR}{name}").st_ino))
    return found


def leftovers(run_id: str) -> list[str]:
    """Entries of /dev/shm that belong to the run, in use or not."""
    check_run_id(run_id)
    return [entry for entry in entries() if run_of(entry) == run_id]


def has_objects(run_id: str) -> bool:
    """Whether anything of the run that is this user's own is there; what another user planted does not count."""
    for entry in leftovers(run_id):
        with contextlib.suppress(FileNotFoundError, TransportError):
            check_private_file(os.lstat(f"{SHM_DIR}/{entry}"), entry)
            return True
    return False


def check_private_file(info: os.stat_result, what: str) -> None:
    """Refuse a file that another user could have planted: wrong owner, wrong type, readable by others."""
    problems = []
    if not stat.S_ISREG(info.st_mode):
        problems.append("is not a regular file")
    if info.st_uid != os.geteuid():
        problems.append(f"belongs to uid {info.st_uid}, not to {os.geteuid()}")
    if stat.S_IMODE(info.st_mode) & 0o077:
        problems.append(f"has mode {stat.S_IMODE(info.st_mode):04o}, not 0600")
    if problems:
        raise TransportError(
            f"{what} {' and '.join(problems)}",
            f"remove {what} if nobody needs it; it was not made by this program for this user",
        )

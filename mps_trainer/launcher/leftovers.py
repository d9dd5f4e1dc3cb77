"""What dead runs left: files in the state folder and names in /dev/shm, found and removed by rule.

The rule is the locks: a run's files are left over when its locks are free, a segment when both ends' life locks are
free, a doorbell when nobody has it open, a channel's semaphores with their segment or a minute after it, the folder
of a private Ray when the process that started it is gone. A lock that is held overrules everything. Shared memory of
a run that our state folder does not know may belong to a run under another state folder which is between two lives;
it gets ten minutes.

`mps_trainer.transport` has the same rules; they are here once more, for names only, because the transport brings
pyarrow, and a supervisor has to stay small.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.run import RunPaths, is_held, is_run_alive, run_paths, state_dir

SHM = Path("/dev/shm")
RAY_FOLDERS = Path("/tmp/mpst-ray-*")  # short, because Ray puts Unix sockets in there
RAY_FOLDER_LOCK = "owner.lock"
_NAME = re.compile(
    r"mpst\.(?P<segment_of>[A-Za-z0-9][\w-]{0,23})\.(?P<index>\d{1,4})"
    r"|sem\.mpst\.(?P<bell_of>[A-Za-z0-9][\w-]{0,23})\.bell"
    r"|sem\.mpst\.(?P<semaphore_of>[A-Za-z0-9][\w-]{0,23})\.(?P<channel>\d{1,4})\.[rs]",
    re.ASCII,
)
_UNKNOWN_RUN_SECONDS = 600.0
_LONE_SEMAPHORE_SECONDS = 60.0  # younger than this, an operator may just be making its channel
_WHOLE_FILE = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@dataclass(frozen=True)
class Leftover:
    """One thing that a dead run left."""

    run_id: str
    path: Path
    num_bytes: int


@dataclass(frozen=True)
class _ShmObject:
    run_id: str
    path: Path
    channel: str = ""  # of a semaphore: the index of its segment

    @property
    def segment(self) -> Path:
        return SHM / f"mpst.{self.run_id}.{self.channel}"


def remove_run(paths: RunPaths, run_id: str) -> None:
    """Remove what a run leaves on its end; what an operator still holds stays for that operator to remove."""
    for item in _shm_objects():
        if item.run_id == run_id:
            _remove_shm(item)
    paths.remove()


def find_leftovers() -> list[Leftover]:
    """Everything of this user that belongs to dead runs."""
    state_files = list(_dead_state_files())
    return [
        *(Leftover(_run_of(path), path, path.lstat().st_size) for path in state_files),
        *(Leftover("private Ray", path, 0) for path in _dead_ray_folders()),
        *(
            Leftover(item.run_id, item.path, _size(item.path))
            for item in _dead_objects({_run_of(path) for path in state_files})
            if _is_free(item)
        ),
    ]


def remove_leftovers() -> list[Leftover]:
    """Remove what `find_leftovers` finds, and give what is gone."""
    found = find_leftovers()
    state_files = list(_dead_state_files())
    for item in _dead_objects({_run_of(path) for path in state_files}):
        _remove_shm(item)
    for folder in _dead_ray_folders():
        shutil.rmtree(folder, ignore_errors=True)
    # Last, because they are what makes a run known.
    for path in state_files:
        path.unlink(missing_ok=True)
    return [item for item in found if not item.path.exists()]


def _dead_objects(known: set[str]) -> list[_ShmObject]:
    return [
        item
        for item in _shm_objects()
        if not is_run_alive(item.run_id) and (item.run_id in known or _age(item.path) > _UNKNOWN_RUN_SECONDS)
    ]


def _run_of(state_file: Path) -> str:
    return state_file.name.partition(".")[0]


def _dead_state_files() -> Iterator[Path]:
    for path in sorted((state_dir() / "runs").iterdir()):
        run_id = _run_of(path)
        if not is_run_alive(run_id) and not is_held(run_paths(run_id).owner_lock):
            yield path


def _dead_ray_folders() -> list[Path]:
    found = []
    for folder in sorted(RAY_FOLDERS.parent.glob(RAY_FOLDERS.name)):
        lock = folder / RAY_FOLDER_LOCK
        # Without a lock it is either just being made, or none of ours.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if folder.lstat().st_uid == os.getuid() and lock.exists() and not is_held(lock):
                found.append(folder)
    return found


def _shm_objects() -> list[_ShmObject]:
    found = []
    for path in sorted(SHM.glob("*mpst.*")):
        match = _NAME.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):
            if match is not None and path.lstat().st_uid == os.getuid():
                run_id = match["segment_of"] or match["bell_of"] or match["semaphore_of"]
                found.append(_ShmObject(run_id, path, match["channel"] or ""))
    return found


def _is_free(item: _ShmObject) -> bool:
    if not item.channel:
        return not is_held(item.path)
    if item.segment.exists():
        return not is_held(item.segment)
    return _age(item.path) > _LONE_SEMAPHORE_SECONDS


def _remove_shm(item: _ShmObject) -> None:
    if item.channel:
        if not item.segment.exists() and _age(item.path) > _LONE_SEMAPHORE_SECONDS:
            item.path.unlink(missing_ok=True)
        return
    try:
        descriptor = os.open(item.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        # Gone, or a symlink, which is none of ours.
        return
    try:
        # Who has the whole file has both life locks of a segment, and the one of a doorbell.
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        for suffix in ("r", "s"):
            (SHM / f"sem.{item.path.name}.{suffix}").unlink(missing_ok=True)
        item.path.unlink(missing_ok=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _age(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0

"""What dead runs left: files in the state folder and names in /dev/shm, found and removed by rule.

The rule is the locks: a run's files are left over when its locks are free, the folder of a private Ray when the
process that started it is gone, and for /dev/shm the rules of `mps_trainer.transport.sweep` hold.

A run is known as long as it has a file in our state folder. So whoever ends a run leaves its run file while anything
of the run is in /dev/shm (an operator that lives has its segment), and the file goes with the last of these objects:
what a killed operator leaves is removed at once. Shared memory of a run that our state folder does not know may
belong to a run under another state folder which is between two lives; it gets ten minutes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.launcher.shm_objects import (
    UNFINISHED_SECONDS,
    ShmObject,
    is_bell_in_use,
    is_free,
    is_used,
    operators_of,
    remove_object,
    shm_objects,
)
from mps_trainer.mps.sweep import sweep_daemons
from mps_trainer.run import RunPaths, is_held, is_run_alive, run_paths, state_dir

RAY_FOLDERS = Path("/tmp/mpst-ray-*")  # short, because Ray puts Unix sockets in there
RAY_FOLDER_LOCK = "owner.lock"
_UNKNOWN_RUN_SECONDS = 600.0


@dataclass(frozen=True)
class Leftover:
    """One thing that a dead run left."""

    run_id: str
    path: Path
    num_bytes: int


@dataclass(frozen=True)
class Waiting:
    """One object in /dev/shm of a run that does not live, which may not be removed yet.

    Attributes:
        until: when it may, in seconds since the epoch; None when a process decides that, which `why` names.
    """

    run_id: str
    path: Path
    num_bytes: int
    why: str
    until: float | None


def remove_run(paths: RunPaths, run_id: str) -> None:
    """Remove what a run leaves on its end; what an operator still holds stays for that operator to remove."""
    for item in shm_objects():
        if item.run_id == run_id:
            remove_object(item)
    paths.remove(keep_record=any(item.run_id == run_id for item in shm_objects()))


def find_leftovers() -> list[Leftover]:
    """Everything of this user that belongs to dead runs and can be removed now."""
    state_files = list(_dead_state_files())
    objects = shm_objects()
    free = [item for item in _dead_objects(objects, {_run_of(path) for path in state_files}) if is_free(item)]
    waiting = {item.run_id for item in objects if item not in free}
    return [
        *(Leftover(_run_of(path), path, _size(path)) for path in state_files if _run_of(path) not in waiting),
        *(Leftover("private Ray", path, 0) for path in _dead_ray_folders()),
        *(Leftover(item.run_id, item.path, item.num_bytes) for item in free),
    ]


def remove_leftovers() -> list[Leftover]:
    """Remove what `find_leftovers` finds, and give what is gone."""
    found = find_leftovers()
    state_files = list(_dead_state_files())
    for item in _dead_objects(shm_objects(), {_run_of(path) for path in state_files}):
        remove_object(item)
    for folder in _dead_ray_folders():
        shutil.rmtree(folder, ignore_errors=True)
    sweep_daemons(is_run_alive)
    # Last, because they are what makes a run known, and only when nothing of it waits any more.
    waiting = {item.run_id for item in shm_objects()}
    for path in state_files:
        if _run_of(path) in waiting:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [item for item in found if not item.path.exists()]


def find_waiting() -> list[Waiting]:
    """Every object of a run that does not live which `remove_leftovers` leaves alone, with the reason."""
    known = {_run_of(path) for path in _dead_state_files()}
    return [
        Waiting(item.run_id, item.path, item.num_bytes, *reason)
        for item in shm_objects()
        if not is_run_alive(item.run_id) and (reason := _why_it_waits(item, known)) is not None
    ]


def _why_it_waits(item: ShmObject, known: set[str]) -> tuple[str, float | None] | None:
    if is_bell_in_use(item.run_id) or is_used(item):
        pids = operators_of(item.run_id)
        who = f"process {', '.join(map(str, pids))}" if pids else "a process"
        if item.run_id in known:
            return f"{who} works for the run, has to notice that it has ended, and leaves then or when it ends", None
        return f"{who} works for the run, which is under another state folder or has lost its run file", None
    if not _is_over(item, known):
        why = "no run file is here for it: its run may be between two lives under another state folder"
        return why, item.made + _UNKNOWN_RUN_SECONDS
    if is_free(item):
        return None
    return "it is unfinished: an operator may just be making its channel", item.made + UNFINISHED_SECONDS


def _dead_objects(objects: list[ShmObject], known: set[str]) -> list[ShmObject]:
    return [
        item
        for item in objects
        if not is_run_alive(item.run_id)
        and _is_over(item, known)
        # Whatever our state folder says: who has the doorbell open works for the run.
        and not is_bell_in_use(item.run_id)
    ]


def _is_over(item: ShmObject, known: set[str]) -> bool:
    return item.run_id in known or time.time() - item.made > _UNKNOWN_RUN_SECONDS


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


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

"""What dead runs left: files in the state folder and names in /dev/shm, found and removed by rule.

The rule is the locks: a run's files are left over when its locks are free, the folder of a private Ray when the
process that started it is gone, and for /dev/shm the rules of `mps_trainer.transport.sweep` hold. Shared memory of a
run that our state folder does not know may belong to a run under another state folder which is between two lives; it
gets ten minutes.

Names, layout and locks are the transport's own. Its sweep is not called here because it brings numpy, and a
supervisor has to stay small; a test compares the two on the same objects.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.errors import TransportError
from mps_trainer.mps.sweep import sweep_daemons
from mps_trainer.run import RunPaths, is_held, is_run_alive, run_paths, state_dir
from mps_trainer.transport import layout, names, weights_file
from mps_trainer.transport.locks import LockFile, private_lock_file

SHM = Path(names.SHM_DIR)
RAY_FOLDERS = Path("/tmp/mpst-ray-*")  # short, because Ray puts Unix sockets in there
RAY_FOLDER_LOCK = "owner.lock"
_UNKNOWN_RUN_SECONDS = 600.0
# Younger than this, an operator may just be making its channel, and has not locked it yet.
_UNFINISHED_SECONDS = 60.0
_BELL, _WEIGHTS = -1, -2
_LARGEST_HEADER = 64 * layout.PAGE
_LIFE_LOCKS = (layout.LOCK_OPERATOR_LIFE, layout.LOCK_SIDECAR_LIFE)


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
    channel: int  # _BELL for the run's doorbell, _WEIGHTS for the snapshot of its model
    is_segment: bool

    @property
    def segment(self) -> Path:
        return SHM / names.segment_name(self.run_id, self.channel).lstrip("/")


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
    sweep_daemons(is_run_alive)
    # Last, because they are what makes a run known.
    for path in state_files:
        path.unlink(missing_ok=True)
    return [item for item in found if not item.path.exists()]


def _dead_objects(known: set[str]) -> list[_ShmObject]:
    return [
        item
        for item in _shm_objects()
        if not is_run_alive(item.run_id)
        and (item.run_id in known or _age(item.path) > _UNKNOWN_RUN_SECONDS)
        # Whatever our state folder says: who has the doorbell open works for the run.
        and not _is_bell_in_use(item.run_id)
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
    """Objects of ours, segments first: they take their semaphores along."""
    found = []
    for entry in names.entries():
        path = SHM / entry
        with contextlib.suppress(FileNotFoundError, TransportError):
            if segment := names.parse_segment(entry):
                names.check_private_file(path.lstat(), entry)
                found.append(_ShmObject(segment[0], path, segment[1], True))
            elif semaphore := names.parse_semaphore(entry):
                names.check_private_file(path.lstat(), entry)
                channel = _BELL if semaphore[1] == "bell" else int(semaphore[1].partition(".")[0])
                found.append(_ShmObject(semaphore[0], path, channel, False))
            elif run_id := names.parse_weights(entry):
                names.check_private_file(path.lstat(), entry)
                found.append(_ShmObject(run_id, path, _WEIGHTS, False))
    return sorted(found, key=lambda item: not item.is_segment)


def _is_bell_in_use(run_id: str) -> bool:
    with private_lock_file(names.semaphore_path(names.bell_name(run_id))) as file:
        return file is not None and file.held_elsewhere(0)


def _is_free(item: _ShmObject) -> bool:
    if item.channel == _WEIGHTS:
        return weights_file.is_removable(item.run_id, _UNFINISHED_SECONDS)
    if item.is_segment:
        with private_lock_file(item.path) as file:
            return file is not None and _is_segment_free(file, item.run_id)
    if item.channel == _BELL:
        return not _is_bell_in_use(item.run_id)
    if item.segment.exists():
        with private_lock_file(item.segment) as file:
            return file is not None and _is_segment_free(file, item.run_id)
    return _age(item.path) > _UNFINISHED_SECONDS


def _is_segment_free(file: LockFile, run_id: str) -> bool:
    if any(file.held_elsewhere(lock) for lock in _LIFE_LOCKS):
        return False
    return _is_finished(file.fd, run_id) or time.time() - os.fstat(file.fd).st_mtime > _UNFINISHED_SECONDS


def _is_finished(descriptor: int, run_id: str) -> bool:
    """Whether a segment has a valid header of its run."""
    try:
        raw = os.pread(descriptor, _LARGEST_HEADER, 0)
        return layout.unpack_header(raw, os.fstat(descriptor).st_size).run_id == run_id
    except TransportError:
        return False


def _remove_shm(item: _ShmObject) -> None:
    if item.channel == _WEIGHTS:
        weights_file.remove_weights(item.run_id, _UNFINISHED_SECONDS)
        return
    if not item.is_segment and item.channel != _BELL:
        if not item.segment.exists() and _age(item.path) > _UNFINISHED_SECONDS:
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

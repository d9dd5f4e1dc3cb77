"""What dead runs left: files in the state folder and names in /dev/shm, found and removed by rule.

A thing is left over only if it is ours (our uid), its run's locks are free, no process holds a lock on it and no
process that we can see has it mapped. So a run that lives under another state folder keeps what it has.

The transport package names its objects `mpst.<run id>.*` and `sem.mpst.<run id>.*`; this module reads the names
without it, so that a supervisor stays small.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.run import RunPaths, is_held, is_run_alive, run_paths, state_dir

SHM = Path("/dev/shm")
_NAME = re.compile(r"(?:sem\.)?mpst\.(?P<run_id>[0-9a-f]{8})(?:\..*)?")


@dataclass(frozen=True)
class Leftover:
    """One thing that a dead run left."""

    run_id: str
    path: Path
    num_bytes: int


def shm_names(run_id: str) -> list[Path]:
    """Segments and semaphores of one run in /dev/shm."""
    return [path for path, owner in _named(SHM) if owner == run_id]


def remove_run(paths: RunPaths, run_id: str) -> None:
    """Remove what a run leaves on its end; the run folder with its results stays."""
    for path in shm_names(run_id):
        path.unlink(missing_ok=True)
    paths.remove()


def find_leftovers() -> list[Leftover]:
    """Everything of this user that belongs to dead runs."""
    found = [_leftover(path.stem.partition(".")[0], path) for path in _dead_state_files()]
    orphans = [(path, run_id) for path, run_id in _named(SHM) if not is_run_alive(run_id)]
    if orphans:
        mapped = _mapped_names()
        found += [
            _leftover(run_id, path) for path, run_id in orphans if str(path) not in mapped and not is_held(path)
        ]
    return [item for item in found if item is not None]


def remove_leftovers() -> list[Leftover]:
    """Remove what `find_leftovers` finds, and say what it was."""
    found = find_leftovers()
    for item in found:
        item.path.unlink(missing_ok=True)
    return found


def _leftover(run_id: str, path: Path) -> Leftover | None:
    try:
        return Leftover(run_id, path, path.lstat().st_size)
    except FileNotFoundError:
        return None


def _dead_state_files() -> Iterator[Path]:
    for path in sorted((state_dir() / "runs").iterdir()):
        run_id = path.name.partition(".")[0]
        if not is_run_alive(run_id) and not is_held(run_paths(run_id).owner_lock):
            yield path


def _named(folder: Path) -> Iterator[tuple[Path, str]]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in sorted(entries, key=lambda entry: entry.name):
        match = _NAME.fullmatch(entry.name)
        if match is None:
            continue
        try:
            mine = entry.stat(follow_symlinks=False).st_uid == os.getuid() and entry.is_file(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if mine:
            yield Path(entry.path), match["run_id"]


def _mapped_names() -> set[str]:
    """Paths under /dev/shm that a process which we may look into has mapped."""
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue
        names.update(line.rpartition(" ")[2] for line in text.splitlines() if "/dev/shm/" in line)
    return names

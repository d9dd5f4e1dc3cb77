"""The folder of a benchmark for logs, run folders and the state of its runs; gone when it ends, or with the next one.

A benchmark that is killed leaves its folder, and with it the checkpoints of every sidecar. Its lock says that nobody
works there any more.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mps_trainer.run import holder_note, is_held, try_hold

# Short: the sockets of an MPS daemon lie in it.
_PLACE, _PREFIX = Path("/tmp"), "mt-"
_LOCK, _NOTE = "bench.lock", "a benchmark of mps-trainer"
#: Under the folder, the state folder of its runs.
STATE = "s"


@contextmanager
def work_dir(named: Path | None) -> Iterator[Path]:
    """The folder `named`, which stays, or a temporary one."""
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
        # That of a killed benchmark, which somebody looks into: another one that starts now must not remove it.
        (named / _LOCK).unlink(missing_ok=True)
        yield named.absolute()
        return
    remove_dead()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_PLACE) as folder:
        unfinished = Path(folder) / f"{_LOCK}.new"
        lock = try_hold(unfinished, _NOTE)
        # Another benchmark that starts now must never see the file without its lock.
        unfinished.rename(Path(folder) / _LOCK)
        try:
            yield Path(folder)
        finally:
            if lock is not None:
                lock.release()


def remove_dead() -> list[Path]:
    """Remove the folders of benchmarks of this user that were killed; those that are gone."""
    dead = [folder for folder in sorted(_PLACE.glob(f"{_PREFIX}*")) if _is_dead(folder)]
    for folder in dead:
        shutil.rmtree(folder, ignore_errors=True)
    return dead


def _is_dead(folder: Path) -> bool:
    with suppress(OSError):
        ours = folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()
        lock = folder / _LOCK
        # Without a lock it is being made, or none of ours.
        if not ours or lock.is_symlink() or not lock.is_file() or is_held(lock) or holder_note(lock) != _NOTE:
            return False
        state = folder / STATE
        # A sidecar may still be ending; an MPS daemon ends with its last client, and nothing is taken from under it.
        lives = any(is_held(lock) for lock in (state / "runs").glob("*.lock"))
        return not lives and not any((state / "mps").glob("*"))
    return False

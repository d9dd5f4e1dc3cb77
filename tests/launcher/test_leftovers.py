"""What dead runs left is found and removed; what lives, or is somebody else's, is not touched."""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_helpers import segment_content

from mps_trainer.launcher.leftovers import find_leftovers, remove_leftovers, remove_run
from mps_trainer.run import new_run_id, run_paths, try_hold
from mps_trainer.transport import layout

SHM = Path("/dev/shm")


@pytest.fixture
def run_id() -> Iterator[str]:
    name = new_run_id()
    yield name
    for path in SHM.glob(f"*mpst.{name}.*"):
        path.unlink()


def make(*names: str) -> list[Path]:
    paths = [SHM / name for name in names]
    for path in paths:
        path.write_bytes(b"x")
        path.chmod(0o600)
    return paths


def objects_of(run_id: str) -> list[Path]:
    paths = make(f"mpst.{run_id}.0", f"sem.mpst.{run_id}.0.s", f"sem.mpst.{run_id}.0.r", f"sem.mpst.{run_id}.bell")
    paths[0].write_bytes(segment_content(run_id))
    return paths


def test_objects_of_a_dead_run_are_removed(run_id: str) -> None:
    paths = objects_of(run_id)
    run_paths(run_id).run_file.write_text("{}")
    assert {item.path for item in find_leftovers()} >= {*paths, run_paths(run_id).run_file}
    removed = {item.path for item in remove_leftovers()}
    assert removed >= set(paths)
    assert not any(path.exists() for path in paths)
    assert not run_paths(run_id).run_file.exists()


def test_objects_of_a_live_run_stay(run_id: str) -> None:
    paths = objects_of(run_id)
    with try_hold(run_paths(run_id).supervisor_lock) or pytest.fail("the lock is held"):
        remove_leftovers()
        assert all(path.exists() for path in paths)
    run_paths(run_id).remove()


def test_a_segment_that_a_process_holds_stays_whatever_our_state_folder_says(run_id: str) -> None:
    paths = objects_of(run_id)
    descriptor = os.open(paths[0], os.O_RDWR)
    life = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, layout.LOCK_OPERATOR_LIFE, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, life)
    remove_run(run_paths(run_id), run_id)
    assert [path.exists() for path in paths] == [True, True, True, False]
    os.close(descriptor)
    remove_run(run_paths(run_id), run_id)
    assert not any(path.exists() for path in paths)


def make_older(path: Path, seconds: float) -> None:
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


def test_objects_of_a_run_that_we_do_not_know_get_ten_minutes(run_id: str) -> None:
    paths = objects_of(run_id)
    remove_leftovers()
    assert all(path.exists() for path in paths)
    for path in paths:
        make_older(path, 601)
    remove_leftovers()
    assert not any(path.exists() for path in paths)


def test_a_lone_semaphore_gets_a_minute(run_id: str) -> None:
    [path] = make(f"sem.mpst.{run_id}.3.s")
    remove_run(run_paths(run_id), run_id)
    assert path.exists()
    make_older(path, 61)
    remove_run(run_paths(run_id), run_id)
    assert not path.exists()


def test_names_that_only_look_like_ours_stay(run_id: str) -> None:
    paths = make(f"mpst.{run_id}.x", f"mpst.{run_id}.0.bak")
    remove_leftovers()
    assert all(path.exists() for path in paths)


def test_a_run_that_is_about_to_start_stays(run_id: str) -> None:
    owner = try_hold(run_paths(run_id).owner_lock)
    assert owner is not None
    remove_leftovers()
    assert run_paths(run_id).owner_lock.exists()
    owner.release()
    run_paths(run_id).remove()


def test_the_folder_of_a_private_ray_goes_when_its_owner_is_dead() -> None:
    folder = Path(tempfile.mkdtemp(prefix="mpst-ray-", dir="/tmp"))
    remove_leftovers()
    assert folder.exists(), "a folder that is just being made was removed"
    lock = try_hold(folder / "owner.lock")
    assert lock is not None
    remove_leftovers()
    assert folder.exists(), "a folder whose owner lives was removed"
    lock.release()
    remove_leftovers()
    assert not folder.exists()

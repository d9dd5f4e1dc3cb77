"""What a benchmark leaves behind when it, or one of its processes, ends badly; no process but this one."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mps_trainer.bench import feed as feeds
from mps_trainer.bench import work_dir as folders
from mps_trainer.bench.feed import Feed
from mps_trainer.bench.hosted import RestService
from mps_trainer.bench.hosted_main import _end_when_alone
from mps_trainer.bench.saved import Saved
from mps_trainer.bench.trainers import SidecarTrainer
from mps_trainer.bench.work import find_work
from mps_trainer.run import try_hold

_WORK = find_work("A", {"width": 8, "hidden": [8, 8]}, 1)


def made_by_a_killed_one(place: Path, name: str) -> Path:
    folder = place / name
    (folder / "s" / "runs").mkdir(parents=True)
    (folder / "s" / "runs" / "abcd1234.sidecar.lock").touch()
    (folder / "bench.lock").write_text("a benchmark of mps-trainer")
    (folder / "checkpoint").write_bytes(bytes(100))
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "_PLACE", tmp_path)
    return tmp_path


def test_the_folder_of_a_killed_benchmark_goes_with_the_next_one(place: Path) -> None:
    dead = made_by_a_killed_one(place, "mt-dead")
    with folders.work_dir(None) as folder:
        assert not dead.exists()
        assert folder.parent == place
        assert [path.name for path in folder.iterdir()] == ["bench.lock"]
        # Another one that starts now takes this one for alive.
        with folders.work_dir(None) as other:
            assert folder.is_dir()
            assert other != folder
    assert list(place.iterdir()) == []


def test_only_what_is_surely_dead_and_ours_is_removed(place: Path) -> None:
    kept = [made_by_a_killed_one(place, f"mt-{name}") for name in ("held", "ending", "daemon", "unlocked", "other")]
    held, ending, daemon, unlocked, other = kept
    (daemon / "s" / "mps" / "abcd1234").mkdir(parents=True)
    (unlocked / "bench.lock").unlink()
    (other / "bench.lock").write_text("of another program")
    (place / "mt-link").symlink_to(made_by_a_killed_one(place, "elsewhere"))
    (place / "mt-file").touch()
    locks = [
        try_hold(held / "bench.lock", "a benchmark of mps-trainer"),
        try_hold(ending / "s" / "runs" / "abcd1234.sidecar.lock"),
    ]
    assert all(locks)
    assert folders.remove_dead() == []
    for lock in locks:
        assert lock is not None
        lock.release()
    assert folders.remove_dead() == [ending, held]
    assert sorted(path.name for path in place.iterdir()) == [
        "elsewhere", "mt-daemon", "mt-file", "mt-link", "mt-other", "mt-unlocked"
    ]  # fmt: skip


def test_a_folder_that_was_named_stays(tmp_path: Path) -> None:
    with folders.work_dir(tmp_path / "deep" / "named") as folder:
        assert folder == tmp_path / "deep" / "named"
    assert list(folder.iterdir()) == []


def test_the_folder_of_a_killed_one_that_is_named_stays_too(place: Path) -> None:
    dead = made_by_a_killed_one(place, "mt-dead")
    with folders.work_dir(dead) as folder:
        assert folder == dead
        assert folders.remove_dead() == []
    assert folders.remove_dead() == []
    assert (dead / "checkpoint").exists()


def test_a_disk_that_fills_up_leaves_the_result_before_and_no_half_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saved(tmp_path / "out")
    saved.keep({"round": 1})
    whole = (tmp_path / "out.json").read_text()

    def fills(path: Path, text: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", fills)
        saved.keep({"round": 2})
    assert "No space left" in saved.problem
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert (tmp_path / "out.json").read_text() == whole


def test_a_service_ends_with_the_benchmark() -> None:
    reads, writes = os.pipe()
    server = SimpleNamespace(should_exit=False)
    waits = threading.Thread(target=_end_when_alone, args=(server, reads))
    waits.start()
    os.write(writes, b"not yet")
    assert not server.should_exit
    os.close(writes)
    waits.join(20)
    os.close(reads)
    assert server.should_exit


@pytest.mark.parametrize("kind", ["sidecar", "rest"])
def test_what_a_feed_waits_for_is_ended_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("MPS_TRAINER_STATE_DIR", str(tmp_path / "s"))
    monkeypatch.setattr(feeds, "SCORE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(feeds, "_END_S", 0.1)
    given, ended = threading.Event(), threading.Event()

    def give(_: Any) -> int:
        given.set()
        # As a record in the ring of a sidecar that somebody stopped with SIGSTOP.
        ended.wait()
        return 0

    trainer: Any
    if kind == "sidecar":
        trainer = SidecarTrainer(_WORK, tmp_path, [5])
        trainer._process = SimpleNamespace(stop=lambda _: ended.set())
    else:
        trainer = RestService(_WORK, tmp_path, [5], device="cpu", threads=1, env={})
        monkeypatch.setattr(trainer, "_end", ended.set)
    trainer._feed = feed = Feed(iter([{}] * 9), give, give)
    trainer._stack.callback(feed.close)
    feed.start()
    feed.resume()
    assert given.wait(20)
    alive = []
    trainer._stack.callback(lambda: (feed.join(20), alive.append(feed.is_alive())))
    trainer.close()
    assert alive == [False]

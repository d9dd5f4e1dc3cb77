"""The launcher's rules for /dev/shm and the transport's, on the same objects: both must decide alike."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launcher_helpers import segment_content, weights_content

from mps_trainer.launcher import leftovers
from mps_trainer.launcher.shm_objects import UNFINISHED_SECONDS
from mps_trainer.run import new_run_id, run_paths
from mps_trainer.transport import layout, sweep, weights_layout

SHM = Path("/dev/shm")


@dataclass
class Objects:
    """Objects of one run in /dev/shm, and locks on them."""

    run_id: str = field(default_factory=new_run_id)
    held: list[int] = field(default_factory=list)

    def path(self, name: str) -> Path:
        is_semaphore = name[-1].isalpha() and name != "w"
        return SHM / f"{'sem.' if is_semaphore else ''}mpst.{self.run_id}.{name}"

    def weights(self, *, of: str = "") -> None:
        self.file("w", weights_content(of or self.run_id))

    def segment(self, index: int = 0, *, of: str = "", semaphores: bool = True) -> None:
        self.file(str(index), segment_content(of or self.run_id))
        for end in "rs" if semaphores else "":
            self.file(f"{index}.{end}", bytes(32))

    def file(self, name: str, content: bytes, mode: int = 0o600) -> None:
        self.path(name).write_bytes(content)
        self.path(name).chmod(mode)

    def hold(self, name: str, byte: int, kind: int = fcntl.F_WRLCK) -> None:
        self.held.append(os.open(self.path(name), os.O_RDWR))
        fcntl.fcntl(self.held[-1], fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))

    def grow_old(self, seconds: float = 61) -> None:
        for path in SHM.glob(f"*mpst.{self.run_id}.*"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path, (0, path.stat().st_mtime - seconds))

    def left(self) -> list[str]:
        return sorted(path.name.replace(self.run_id, "RUN") for path in SHM.glob(f"*mpst.{self.run_id}.*"))

    def close(self) -> None:
        for descriptor in self.held:
            os.close(descriptor)
        for path in SHM.glob(f"*mpst.{self.run_id}.*"):
            path.unlink()


def dead(o: Objects) -> None:
    o.segment()
    o.segment(1)
    o.file("bell", bytes(32))


def operator_lives(o: Objects) -> None:
    dead(o)
    o.hold("0", layout.LOCK_OPERATOR_LIFE)


def sidecar_lives(o: Objects) -> None:
    dead(o)
    o.hold("1", layout.LOCK_SIDECAR_LIFE)


def bell_is_open(o: Objects) -> None:
    dead(o)
    o.hold("bell", 0, fcntl.F_RDLCK)


def being_made(o: Objects) -> None:
    o.file("0", bytes(8192))
    o.file("0.s", bytes(32))


def never_finished(o: Objects) -> None:
    being_made(o)
    o.grow_old()


def empty_and_short(o: Objects) -> None:
    o.file("0", b"")
    o.file("1", layout.MAGIC)


def garbage_behind_the_magic(o: Objects) -> None:
    o.file("0", layout.MAGIC + os.urandom(8184))


def header_of_another_run(o: Objects) -> None:
    o.segment(of="0000none")


def cut_short(o: Objects) -> None:
    o.segment()
    os.truncate(o.path("0"), 8192)


def lone_semaphores(o: Objects) -> None:
    o.file("3.s", bytes(32))
    o.file("4.r", bytes(32))


def old_lone_semaphores(o: Objects) -> None:
    lone_semaphores(o)
    o.grow_old()


def planted(o: Objects) -> None:
    o.segment()
    for name in ("1", "bell", "4.s"):
        o.file(name, bytes(32), mode=0o644)
    o.path("2").symlink_to(o.path("0"))
    o.grow_old()


def weights_alone(o: Objects) -> None:
    o.weights()


def weights_are_read(o: Objects) -> None:
    o.segment()
    o.weights()
    o.hold("w", weights_layout.LOCK_READER_LIFE, fcntl.F_RDLCK)


def weights_are_written(o: Objects) -> None:
    o.weights()
    o.hold("w", weights_layout.LOCK_WRITER_LIFE)


def weights_being_made(o: Objects) -> None:
    o.file("w", bytes(8192))


def weights_never_finished(o: Objects) -> None:
    weights_being_made(o)
    o.grow_old()


def weights_of_another_run(o: Objects) -> None:
    o.weights(of="0000none")


def planted_weights(o: Objects) -> None:
    o.file("w", weights_content(o.run_id), mode=0o644)
    o.grow_old()


SCENES: list[Callable[[Objects], None]] = [
    dead, operator_lives, sidecar_lives, bell_is_open, being_made, never_finished, empty_and_short,
    garbage_behind_the_magic, header_of_another_run, cut_short, lone_semaphores, old_lone_semaphores, planted,
    weights_alone, weights_are_read, weights_are_written, weights_being_made, weights_never_finished,
    weights_of_another_run, planted_weights,
]  # fmt: skip


@pytest.fixture
def twins() -> Iterator[tuple[Objects, Objects]]:
    pair = Objects(), Objects()
    yield pair
    for objects in pair:
        objects.close()


@pytest.mark.parametrize("scene", SCENES)
def test_the_end_of_a_run(twins: tuple[Objects, Objects], scene: Callable[[Objects], None]) -> None:
    ours, theirs = twins
    scene(ours)
    scene(theirs)
    leftovers.remove_run(run_paths(ours.run_id), ours.run_id)
    sweep.remove_run(theirs.run_id)
    assert ours.left() == theirs.left()


@pytest.mark.parametrize("scene", SCENES)
def test_a_sweep_over_dead_runs(twins: tuple[Objects, Objects], scene: Callable[[Objects], None]) -> None:
    ours, theirs = twins
    scene(ours)
    scene(theirs)
    run_paths(ours.run_id).run_file.write_text("{}")
    found = {item.path for item in leftovers.find_leftovers() if item.run_id == ours.run_id and item.path.parent == SHM}
    before = set(SHM.glob(f"*mpst.{ours.run_id}.*"))
    leftovers.remove_leftovers()
    sweep.sweep_stale(lambda run_id: run_id != theirs.run_id)
    assert ours.left() == theirs.left()
    assert found == before - set(SHM.glob(f"*mpst.{ours.run_id}.*")), "what is found is not what is removed"


def test_the_scenes_differ_in_what_stays(twins: tuple[Objects, Objects]) -> None:
    ours, theirs = twins
    dead(ours)
    operator_lives(theirs)
    for objects in twins:
        sweep.remove_run(objects.run_id)
    assert ours.left() == []
    assert theirs.left() == ["mpst.RUN.0", "sem.mpst.RUN.0.r", "sem.mpst.RUN.0.s"]


@pytest.mark.parametrize(
    ("scene", "left"),
    [(weights_alone, []), (weights_are_read, ["mpst.RUN.w"]), (weights_are_written, ["mpst.RUN.w"]),
     (weights_being_made, ["mpst.RUN.w"]), (weights_never_finished, []), (planted_weights, ["mpst.RUN.w"])],
)  # fmt: skip
def test_what_becomes_of_weights(
    twins: tuple[Objects, Objects], scene: Callable[[Objects], None], left: list[str]
) -> None:
    scene(twins[0])
    sweep.remove_run(twins[0].run_id)
    assert twins[0].left() == left


def test_the_same_patience() -> None:
    assert UNFINISHED_SECONDS == sweep.UNFINISHED_S

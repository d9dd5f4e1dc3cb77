"""The note of what a sidecar is doing, in a real file."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from mps_trainer.run import doing
from mps_trainer.run.doing import DoingFile, RecordRef, Stage, Subject, read_beat, read_doing

RECORD = RecordRef("/mpst-x", 7, 3, 0, 99)


def packed(*ids: str) -> tuple[bytes, bytes]:
    ends = [0]
    for item in ids:
        ends.append(ends[-1] + len(item.encode()))
    return struct.pack(f"{len(ends)}i", *ends), "".join(ids).encode()


def test_what_was_said_is_read(tmp_path: Path) -> None:
    file = DoingFile(tmp_path, 8)
    assert (read_doing(tmp_path).stage, read_doing(tmp_path).subject) == (Stage.WAITING, None)
    file.begin(5, RECORD, *packed("a", "", "b\u00e4", "c"))
    file.stage(Stage.SCORING)
    found = read_doing(tmp_path)
    assert found.subject == Subject(5, RECORD, ("a", "", "b\u00e4", "c"))
    assert str(found) == "in score(), record 7 of request 3 of /mpst-x (experiences a, , b\u00e4, c)"
    file.begin(6, None, *packed(*"abcdefgh"))
    file.stage(Stage.TRAINING)
    assert str(read_doing(tmp_path)).startswith(
        "in loss() or the optimizer, training step 6 (experiences a, b, c, d, e and 3"
    )
    file.stage(Stage.WAITING)
    assert str(read_doing(tmp_path)) == "waiting for records"


def test_each_stage_is_a_beat(tmp_path: Path) -> None:
    file = DoingFile(tmp_path, 8)
    first = read_beat(tmp_path)
    file.stage(Stage.WAITING)
    assert read_beat(tmp_path) > first
    file.close()
    file.stage(Stage.SAVING)
    assert read_doing(tmp_path).stage is Stage.WAITING


def test_a_writer_that_dies_between_its_writes_leaves_the_old_subject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DoingFile(tmp_path, 8)
    file.begin(1, None, *packed("old"))
    file.stage(Stage.TRAINING)
    write = os.pwrite
    # The kernel took only the first bytes of the new subject, and the header never came.
    monkeypatch.setattr(doing.os, "pwrite", lambda descriptor, data, place: write(descriptor, data[:9], place))
    file.begin(2, None, *packed("new"))
    assert read_doing(tmp_path).subject == Subject(1, None, ("old",))


def test_a_torn_subject_is_no_subject(tmp_path: Path) -> None:
    file = DoingFile(tmp_path, 8)
    file.begin(1, None, *packed("abcdef"))
    file.stage(Stage.TRAINING)
    content = (tmp_path / "doing").read_bytes()
    (tmp_path / "doing").write_bytes(content.replace(b"abcdef", b"abcxef"))
    assert (read_doing(tmp_path).stage, read_doing(tmp_path).subject) == (Stage.TRAINING, None)
    for junk in (b"", b"MPSD", b"x" * 200, b"MPSD\xff\x00" + bytes(200)):
        (tmp_path / "doing").write_bytes(junk)
        assert read_doing(tmp_path) is None
        assert read_beat(tmp_path) is None


def test_more_ids_than_fit_are_left_out(tmp_path: Path) -> None:
    file = DoingFile(tmp_path, 1)
    ids = [f"{i:0200}" for i in range(1000)]
    file.begin(1, None, *packed(*ids))
    file.stage(Stage.TRAINING)
    eids = read_doing(tmp_path).subject.eids
    assert 1 <= len(eids) < 1000
    assert list(eids) == ids[: len(eids)]


def test_without_a_folder_nothing_is_noted_and_nothing_fails(tmp_path: Path) -> None:
    file = DoingFile(tmp_path / "gone", 8)
    file.begin(1, None, *packed("a"))
    file.stage(Stage.TRAINING)
    assert read_doing(tmp_path / "gone") is None


def test_a_link_in_its_place_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "doing").symlink_to(victim)
    DoingFile(tmp_path, 8).stage(Stage.WAITING)
    assert victim.read_text() == "mine"


def test_a_file_that_cannot_be_read_or_removed_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DoingFile(tmp_path, 8).close()

    def refuse(*args: object, **kwargs: object) -> bytes:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert read_doing(tmp_path) is None
    doing.forget_doing(tmp_path)

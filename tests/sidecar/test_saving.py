"""When a checkpoint is saved, and how seldom a full disk is tried again. A real folder: test_disk_refuses."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mps_trainer.run import Status
from mps_trainer.sidecar import saving
from mps_trainer.sidecar.own_files import OwnFiles
from mps_trainer.sidecar.saving import Saving

MOST = 1000
EVERY = 10


class Learning:
    """A model that only counts, beside a journal of so many bytes, on a disk that is full or not."""

    def __init__(self) -> None:
        self.trainer = SimpleNamespace(step=0)
        self.learner = SimpleNamespace(trainer=self.trainer)
        self.journal = SimpleNamespace(growth=0)
        self.full = False
        self.tried: list[tuple[int, int]] = []

    def save(self) -> None:
        self.tried.append((self.trainer.step, self.journal.growth))
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.journal.growth = 0


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Learning, OwnFiles, Saving]:
    monkeypatch.setattr(saving, "_MAX_JOURNAL_BYTES", MOST)
    learning: Any = Learning()
    own = OwnFiles(Status(run_id="12345678"), tmp_path)
    note: Any = SimpleNamespace(stage=lambda _: None)
    return learning, own, Saving(learning, own, note, EVERY)


def test_a_full_disk_is_tried_each_so_many_steps_and_not_after_each(made: tuple[Learning, OwnFiles, Saving]) -> None:
    learning, own, ours = made
    learning.full = True
    for step in range(1, 36):
        learning.trainer.step = step
        ours.save_if_due(behind=False)
    assert [step for step, _ in learning.tried] == [10, 20, 30]
    assert "a checkpoint cannot be written: No space left on device" in own.status.trouble
    learning.full = False
    ours.save_if_changed()
    assert own.status.trouble == ""
    ours.save_if_changed()
    assert [step for step, _ in learning.tried[3:]] == [35], "the newest checkpoint holds all there is"


def test_a_large_journal_on_a_full_disk_is_tried_again_only_once_it_has_grown_by_a_quarter(
    made: tuple[Learning, OwnFiles, Saving],
) -> None:
    learning, _, ours = made

    def grow_by(more: int) -> list[int]:
        learning.tried.clear()
        for _ in range(more // 10):
            learning.journal.growth += 10
            ours.save_if_due(behind=False)
        return [growth for _, growth in learning.tried]

    learning.full = True
    learning.journal.growth = 2 * MOST
    ours.save_if_due(behind=True)
    assert learning.tried == [], "what is still being taken is no growth"
    learning.journal.growth = 0
    # Without the back-off each of the records after the first try would cost a whole checkpoint.
    assert grow_by(1600) == [1010, 1270, 1530]
    learning.full = False
    assert grow_by(200) == [1790]
    assert grow_by(1000) == [1010], "a disk with room again has the old limit"

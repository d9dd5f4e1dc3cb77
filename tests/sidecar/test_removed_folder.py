"""A run folder that is removed under a live sidecar: made again, everything saved again, and said."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from real_sidecar import Run, token_rows
from sidecar_waits import wait_until

from mps_trainer.run import State, Status
from mps_trainer.run.exit_codes import OK
from mps_trainer.run.made_again import make_again, was_removed
from mps_trainer.sidecar.journal import Journal
from mps_trainer.sidecar.loop import Sidecar


def test_real_sidecar_saves_again_what_was_removed_and_a_successor_goes_on_from_it(make_run: Any) -> None:
    run: Run = make_run(batch_size=32, steps_per_batch=2, min_experiences=1, checkpoint_every=1000)
    child, _ = run.start()
    with run.channel() as channel:
        run.wait_for_attach(channel)

        def send(request: int) -> None:
            rows = token_rows(np.random.default_rng(request), 50, 50 * request)
            assert channel.send(rows, request_id=request, want_scores=False).rows_sent == 50

        send(0)
        wait_until(lambda: run.status().batches == 1)
        # At once: amid a slower removal the sidecar would write into what is being removed.
        run.run_dir.rename(run.run_dir.with_name("removed"))
        shutil.rmtree(run.run_dir.with_name("removed"))
        wait_until(lambda: (run.run_dir / "checkpoints" / "step-2" / "state.json").exists())
        assert run.run_dir.stat().st_mode & 0o777 == 0o700
        send(1)
        wait_until(lambda: (found := Status.peek(run.run_dir)) is not None and found.batches == 2)
        assert "the run folder or files in it were removed at " in run.status().trouble
        assert "cannot be written" not in run.status().trouble
        assert not run.paths.spare_status.exists()
        assert "while the run lived, and made again" in run.log()
        child.kill()
        child.wait(90)
        # Of the second batch only the new journal knows.
        child, _ = run.start()
        wait_until(lambda: run.status().experiences == 100 and run.status().version == 4)
        assert "the run folder or files in it were removed at " in run.status().trouble
        child.send_signal(signal.SIGTERM)
        assert child.wait(90) == OK
    assert run.status().state is State.STOPPED
    assert (run.run_dir / "checkpoints" / "step-4" / "state.json").exists()


def test_the_folder_is_looked_for_before_each_of_many_steps() -> None:
    done: list[str] = []
    loop: Any = SimpleNamespace(
        _note=SimpleNamespace(stage=lambda _: None),
        _picture=SimpleNamespace(refresh=lambda: done.append("status")),
        _snapshots=SimpleNamespace(publish_if_due=lambda: None),
        _folder=SimpleNamespace(look=lambda: done.append("folder")),
    )
    Sidecar._before_step(loop)
    assert done == ["status", "folder"]


def test_the_first_word_of_a_removal_stays(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    assert was_removed(folder) == ""
    said = make_again(folder)
    assert said == make_again(folder) == was_removed(folder)


def test_a_journal_that_was_removed_begins_again_and_says_whether_records_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal")
    assert journal.is_in_place
    for unread in (False, True):
        journal.append({"n": 1}, b"abc")
        if not unread:
            journal.skip()
        shutil.rmtree(tmp_path / "journal")
        assert not journal.is_in_place
        assert journal.begin_again() is unread
        assert journal.is_in_place
    # Between its listing of the folder and its look at a file.
    monkeypatch.setattr(Journal, "_files", lambda _: [journal.number, 99])
    assert journal.growth == journal.nbytes == 0
    journal.append({"n": 2}, b"def")
    found = journal.read()
    assert found is not None
    assert (found[0], bytes(found[1])) == ({"n": 2}, b"def")
    journal.close()

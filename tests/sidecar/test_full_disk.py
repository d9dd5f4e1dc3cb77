"""A full disk under the run folder is shown by `mps-trainer status`, though nothing can be written there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mps_trainer.cli import screen
from mps_trainer.cli.screen import Subject
from mps_trainer.launcher.autopsy import Autopsy
from mps_trainer.run import RunPaths, Status, status
from mps_trainer.run.doing import DoingFile, Stage
from mps_trainer.run.exit_codes import CRASHED
from mps_trainer.run.figures import Watcher
from mps_trainer.run.private_files import write_private
from mps_trainer.sidecar.own_files import OwnFiles


def shown(run_dir: Path, spare: Path) -> str:
    found = screen.rows(Subject("12345678", run_dir, "", "off"), Watcher(run_dir, spare).look(), alive=True)
    return "\n".join(f"{label} {text}" for label, text, _ in found)


def test_status_shows_what_a_mocked_full_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, spare = tmp_path / "run", RunPaths(tmp_path / "state" / "12345678.json").spare_status
    run_dir.mkdir()
    spare.parent.mkdir()
    own = OwnFiles(Status(run_id="12345678", version=7, batches=3), run_dir, spare)
    own.save_status()

    def full(path: Path, content: str | bytes) -> None:
        if path.is_relative_to(run_dir):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path.with_suffix(".random.tmp")))
        write_private(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(status, "write_private", full)
        own.failed("a checkpoint", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        own.status.version = 9
        own.save_status()
        found = shown(run_dir, spare)
        assert "a checkpoint cannot be written: No space left on device" in found
        assert "status.json cannot be written: No space left on device" in found
        assert "9 steps" in found, "its numbers go on"
        assert ".tmp" not in found
        before = own.status.trouble
        own.save_status()
        assert own.status.trouble == before, "the operator says each text once"
    own.works("a checkpoint")
    own.save_status()
    assert not spare.exists()
    own.save_status()
    assert "cannot be written" not in shown(run_dir, spare)


def test_status_sees_a_mocked_full_disk_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Status(run_id="12345678").save(tmp_path)
    spare = tmp_path / "none"
    assert "disk of the run folder" not in shown(tmp_path, spare)
    monkeypatch.setattr(screen.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert "the disk of the run folder is full" in shown(tmp_path, spare)
    monkeypatch.undo()
    Status(run_id="12345678").save(tmp_path)
    assert "not there any more" in shown(tmp_path / "gone", tmp_path / "status.json")


def test_the_death_of_a_sidecar_by_a_full_journal_is_told_with_its_reason(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    DoingFile(tmp_path, 8).stage(Stage.WRITING)
    said = Status(run_id="12345678", error="the journal takes 0 of 9 bytes: No space left on device\n  What to do: x")
    with pytest.raises(OSError, match="No such file"):
        said.save(tmp_path / "gone", spare)
    problem = Autopsy(tmp_path, spare=spare).judge(CRASHED)
    assert problem.startswith(" (the journal takes 0 of 9 bytes: No space left on device); it was writing its journal")

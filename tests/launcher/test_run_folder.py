"""A run folder that is removed under a live supervisor."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher_helpers import kill, wait_for

from mps_trainer.launcher import run_folder
from mps_trainer.launcher.process import Ended
from mps_trainer.launcher.run_folder import RunFolder
from mps_trainer.launcher.run_status import RunStatus
from mps_trainer.launcher.runs import list_runs
from mps_trainer.launcher.up import prepare, start_run
from mps_trainer.run import RunRecord, State, Status, run_paths

Write = Callable[..., Path]
Fake = Callable[[str], list[str]]


def test_the_supervisor_makes_it_again_and_the_run_goes_on(write_config: Write, fake: Fake) -> None:
    run = start_run(prepare(write_config()), sidecar_command=fake("good"))
    remove(run.run_dir.parent)
    wait_for(lambda: (run.run_dir / "settings.json").exists(), "the folder again")
    wait_for(lambda: run.run_dir.with_name("latest").resolve() == run.run_dir, "the link again")
    assert run.run_dir.stat().st_mode & 0o777 == 0o700
    kill(run.sidecar_pid, signal.SIGKILL)
    wait_for(lambda: run.paths.run_file.exists() and "start" in _text(run.run_dir / "fake.log"), "a second sidecar")
    wait_for(lambda: (found := Status.peek(run.run_dir)) is not None and found.state is State.READY, "READY")
    log = (run.run_dir / "supervisor.log").read_text()
    assert "the run folder or files in it were removed at " in log
    assert "Traceback" not in log
    assert run.stop() is Ended.BY_ITSELF
    assert list_runs() == []


def test_a_folder_that_cannot_be_made_again_ends_the_run_at_the_next_death_and_leaves_nothing(
    write_config: Write, fake: Fake
) -> None:
    run = start_run(prepare(write_config()), sidecar_command=fake("good"))
    with run.run_dir.joinpath("supervisor.log").open() as log:
        root = run.run_dir.parent
        # It must not make the folder again before the file is there.
        run.supervisor.send_signal(signal.SIGSTOP)
        remove(root)
        # Nothing can be made below a file, by root neither.
        root.touch()
        run.supervisor.send_signal(signal.SIGCONT)
        kill(run.sidecar_pid, signal.SIGKILL)
        assert run.supervisor.wait(30) != 0
        said = log.read()
    assert said.count("was removed and cannot be made again") == 1
    assert "no sidecar can be started" in said
    assert not run.paths.spare_status.exists()
    assert list_runs() == []


def test_a_status_that_the_run_folder_refuses_is_read_from_the_spare_place(tmp_path: Path) -> None:
    record = RunRecord(
        run_id="12345678",
        config="",
        derived_config="",
        run_dir=str(tmp_path / "gone"),
        ray_namespace="",
        settings={},
    )
    paths = run_paths(record.run_id)
    status = RunStatus(record)
    status.save(State.FAILED, "it cannot go on", restarts=3)
    found = status.load()
    assert found is not None
    assert (found.state, found.error, found.restarts) == (State.FAILED, "it cannot go on", 3)
    assert paths.spare_status.stat().st_mode & 0o777 == 0o600
    paths.remove(keep_record=True)
    assert paths.spare_status.exists(), "an operator that is still there reads it"
    (tmp_path / "gone").mkdir()
    status.save(State.STOPPED, "", restarts=3)
    assert not paths.spare_status.exists()
    assert Status.load(tmp_path / "gone", paths.spare_status).state is State.STOPPED


def test_a_log_that_somebody_moves_is_begun_again_and_nothing_else_is_claimed(write_config: Write, fake: Fake) -> None:
    run = start_run(prepare(write_config()), sidecar_command=fake("good"))
    log = run.run_dir / "supervisor.log"
    log.rename(log.with_suffix(".old"))
    wait_for(lambda: "begins again" in _text(log), "a new log")
    assert not (run.run_dir / "removed").exists()
    assert run.stop() is Ended.BY_ITSELF


def test_what_cannot_be_made_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunRecord(
        run_id="12345678", config="", derived_config="", run_dir=str(tmp_path / "r"), ray_namespace="", settings={}
    )
    folder = RunFolder(record)

    def refuse(_: Path) -> str:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "make_again", refuse)
        for _ in range(3):
            folder.look()
    assert caplog.text.count("cannot be made again") == 1
    for _ in range(3):
        folder.look()
    assert caplog.text.count("while the run lived, and made again") == 1


def remove(folder: Path) -> None:
    """At once: amid a slower removal somebody would write into what is being removed."""
    gone = folder.with_name(f"{folder.name}.gone")
    folder.rename(gone)
    shutil.rmtree(gone)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""

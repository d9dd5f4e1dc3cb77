"""The run file and the state folder: what cannot be read or made is a RunError with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mps_trainer.errors import RunError
from mps_trainer.run import STATE_DIR_VARIABLE, RunRecord, boot_id, host_name, state_dir, this_host


def test_this_host_is_its_name_and_its_boot() -> None:
    assert this_host() == f"{host_name()} {boot_id()}"


def test_a_run_file_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot read the run file .*: Is a directory") as caught:
        RunRecord.load(tmp_path)
    assert caught.value.todo


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"\xff\xfe\x00"])
def test_a_run_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(RunError, match="is no run file") as caught:
        RunRecord.load(path)
    assert caught.value.todo


def test_a_state_folder_under_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "state", "Not a directory")):
        monkeypatch.setenv(STATE_DIR_VARIABLE, str(path))
        with pytest.raises(RunError, match=f"cannot make the state folder {path}: {why}") as caught:
            state_dir()
        assert STATE_DIR_VARIABLE in caught.value.todo


_AS_NOBODY = """
import os, sys
from pathlib import Path
from mps_trainer.errors import RunError
from mps_trainer.run import RunRecord, state_dir
if os.geteuid() == 0:
    os.seteuid(65534)
for action in (lambda: RunRecord.load(Path(sys.argv[1])), state_dir):
    try:
        action()
    except RunError as error:
        print(error)
"""


def test_what_another_user_closed_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    run_file = tmp_path / "run.json"
    run_file.write_text("{}")
    run_file.chmod(0)
    answer = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, str(run_file)],
        env={**os.environ, STATE_DIR_VARIABLE: str(closed / "state")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    assert f"cannot read the run file {run_file}: Permission denied" in answer.stdout
    assert f"cannot make the state folder {closed / 'state'}: Permission denied" in answer.stdout
    assert answer.stdout.count("What to do:") == 2

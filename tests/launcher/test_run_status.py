"""The supervisor's hand on the status, on a disk that refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from mps_trainer.launcher.run_status import RunStatus
from mps_trainer.run import RunRecord, State


def test_a_status_that_cannot_be_written_ends_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    record = RunRecord(
        run_id="0123abcd", config="", derived_config="", run_dir=str(folder), ray_namespace="n", settings={}
    )
    status = RunStatus(record)
    status.save(State.RESTARTING, "signal SIGKILL", restarts=1)
    assert "status.json does not say restarting" in caplog.text
    assert "signal SIGKILL" in caplog.text
    folder.mkdir()
    status.save(State.FAILED, "an error", restarts=1)
    found = status.load()
    assert found is not None
    assert (found.state, found.error) == (State.FAILED, "an error")

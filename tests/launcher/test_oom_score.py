"""Whom the kernel takes first when memory runs out, by the real oom_score_adj of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from launcher_helpers import wait_for

from mps_trainer.launcher.sidecar_process import SidecarProcess, prefer_in_oom
from mps_trainer.run import RunRecord


@pytest.fixture
def sleeper() -> Iterator[int]:
    child = subprocess.Popen(["sleep", "60"])
    yield child.pid
    child.kill()
    child.wait()


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_the_first_score_that_is_granted_stands(sleeper: int) -> None:
    inherited = score(sleeper)
    assert prefer_in_oom(sleeper, (inherited + 300, 0)) == inherited + 300 == score(sleeper)
    # Back to what is inherited needs no privilege, whoever raised it; far below it does.
    granted = prefer_in_oom(sleeper, (inherited - 1, inherited))
    assert granted == score(sleeper)
    assert granted in (inherited - 1, inherited)


def test_scores_that_are_refused_are_skipped(sleeper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def unprivileged(path: Path, text: str) -> int:
        if int(text) < 0:
            raise PermissionError(13, "Permission denied")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", unprivileged)
    assert prefer_in_oom(sleeper, (-100,)) is None
    assert prefer_in_oom(sleeper, (-100, 700)) == 700 == score(sleeper)


@pytest.mark.parametrize(("mps", "device", "wanted"), [("off", "cpu", {1000}), ("on", "cuda:0", {-100, 0})])
def test_a_sidecar_is_taken_first_but_not_one_beside_an_engine(
    tmp_path: Path, mps: str, device: str, wanted: set[int]
) -> None:
    inherited = score(os.getpid())
    if inherited:
        pytest.skip("this process is no ordinary one to the kernel")
    record = RunRecord(
        run_id="0123abcd", config="", derived_config="", run_dir=str(tmp_path), ray_namespace="n", settings={}
    )
    # Started inside a worker of Ray, it would inherit what the kernel takes first.
    prefer_in_oom(os.getpid(), (700,))
    try:
        record = replace(record, device=device, mps=mps)
        sidecar = SidecarProcess(record, tmp_path / "run", [sys.executable, "-c", "import time; time.sleep(60)"])
    finally:
        prefer_in_oom(os.getpid(), (0,))
    try:
        wait_for(lambda: score(sidecar.pid) in wanted, "the score")
        sidecar.log.unlink()
        assert sidecar.log_tail() == ""
    finally:
        sidecar.stop(5)


def test_a_process_that_is_gone_has_no_score() -> None:
    with pytest.raises(OSError, match="No such"):
        prefer_in_oom(2**22 + 1, (0,))

"""Who broke the GPU, from a recorded log of the MPS server; no GPU here."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mps_trainer.launcher.gpu_share import GpuShare
from mps_trainer.mps.folder import mps_folder
from mps_trainer.run import new_run_id

SIDECAR, ENGINE = 4711, 4712
LOG = """\
[2026-11-30 10:00:00.000 Server 99] Client {{PID: {0}, Context ID: 1}} encountered a fatal GPU error.
[2026-11-30 10:00:00.001 Server 99] Client {{PID: {1}, Context ID: 2}} is going to be torn down
"""


@pytest.fixture
def share() -> GpuShare:
    run_id = new_run_id()
    mps_folder(run_id).make()
    return GpuShare(run_id, "cuda:0", None)


def write_log(share: GpuShare, text: str) -> None:
    with (share.daemon.folder.log_dir / "server.log").open("a") as file:
        file.write(text)


def test_the_sidecar_is_named_with_what_it_was_doing(share: GpuShare, caplog: pytest.LogCaptureFixture) -> None:
    write_log(share, LOG.format(SIDECAR, ENGINE))
    doing = "in loss() or the optimizer, training step 118 (experiences a, b)"
    told = share.sidecar_has_ended(SIDECAR, doing)
    assert told == f"; the MPS server names process {SIDECAR} (the sidecar, {doing}) for a fatal GPU error"
    assert f"names process {SIDECAR} (the sidecar, {doing}); it ended the clients ({ENGINE},)" in caplog.text


def test_another_process_is_named(share: GpuShare) -> None:
    write_log(share, LOG.format(ENGINE, SIDECAR))
    told = share.sidecar_has_ended(SIDECAR, "in score()")
    assert told == f"; the MPS server names process {ENGINE} for a fatal GPU error"


def test_a_fault_is_told_once(share: GpuShare, tmp_path: Path) -> None:
    write_log(share, LOG.format(ENGINE, SIDECAR))
    share.sidecar_has_ended(SIDECAR)
    assert share.sidecar_has_ended(SIDECAR) == ""


def test_a_fault_that_did_not_tear_the_sidecar_down_is_told_too(share: GpuShare) -> None:
    write_log(share, LOG.format(ENGINE, 5000))
    assert f"process {ENGINE} for a fatal GPU error" in share.sidecar_has_ended(SIDECAR)


def test_what_the_server_writes_a_moment_after_the_death_counts(share: GpuShare) -> None:
    head, tail = LOG.format(ENGINE, SIDECAR).splitlines(keepends=True)
    write_log(share, head)
    late = threading.Timer(0.3, write_log, (share, tail))
    late.start()
    told = share.sidecar_has_ended(SIDECAR, saw_fault=True)
    late.join()
    assert told.count(f"process {ENGINE}") == 1
    assert share.sidecar_has_ended(SIDECAR) == ""

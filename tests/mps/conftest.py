"""Without a GPU: a fake control binary, a state folder of the test's own with a short path."""

import os
import tempfile
from pathlib import Path

import pytest
from mps_helpers import FAKE_CONTROL
from mps_runs import starter

from mps_trainer.launcher.runs import end_runs, list_runs
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import mps_folder


@pytest.fixture
def state(monkeypatch):
    # pytest's tmp_path is longer than a Unix socket's path may be.
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as folder:
        monkeypatch.setenv("MPS_TRAINER_STATE_DIR", f"{folder}/s")
        yield Path(folder)


@pytest.fixture
def fake_daemon(state):
    daemon = MpsDaemon(mps_folder(f"{os.getpid():08x}"), str(FAKE_CONTROL))
    yield daemon
    if daemon.find() is not None:
        daemon.quit()


@pytest.fixture
def start(state, tmp_path, monkeypatch):
    yield starter(state, tmp_path, monkeypatch)
    end_runs(list_runs(), timeout_s=20)

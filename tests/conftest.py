"""Fixtures for every folder. Helpers are in tests/support, which pytest puts on the path."""

from __future__ import annotations

import signal

import pytest

from mps_trainer.transport import locks

pytest_plugins = ["real_sidecar", "spread"]


@pytest.fixture(autouse=True)
def patient_mutex(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the machine holds up inside a mutex, also for a second, costs its peer no record.

    Tests of one that is stopped there set the real limit again.
    """
    monkeypatch.setattr(locks, "MUTEX_S", 30.0)


# A shell without job control starts `scripts/test.sh &` with Ctrl-C ignored, and every process of a test inherits that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

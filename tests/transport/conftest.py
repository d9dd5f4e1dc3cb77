"""Every test gets a run id of its own and fails when it leaves anything in /dev/shm but records that nobody read."""

import os
import secrets

import pytest

from mps_trainer.transport import hub, leftovers, locks, semaphores
from mps_trainer.transport.sweep import reclaim_orphans, remove_run


@pytest.fixture
def run_id():
    name = f"t{os.getpid()}-{secrets.token_hex(3)}"
    yield name
    # A closed channel with unread records stays for a sidecar by rule; everything else must be gone.
    reclaim_orphans(name, keep=0)
    left = leftovers(name)
    remove_run(name)
    assert left == []


@pytest.fixture
def brief_mutex(monkeypatch):
    """The mutex's real time limit, for tests of a process that is stopped inside it."""
    monkeypatch.setattr(locks, "MUTEX_S", 0.05)


@pytest.fixture
def only_bells(monkeypatch):
    """No look now and then: who is not rung for sleeps on until its own time limit."""
    monkeypatch.setattr(semaphores, "SLICE_S", 600.0)
    monkeypatch.setattr(hub, "SLICE_S", 600.0)


@pytest.fixture(params=["total store order", "locks"])
def memory_order(request, monkeypatch):
    """Run a test as on x86-64 and as on aarch64, where more sections take the lock."""
    monkeypatch.setattr(locks, "TOTAL_STORE_ORDER", request.param != "locks")
    return request.param

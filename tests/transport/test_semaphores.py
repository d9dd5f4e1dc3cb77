"""The short look for a post before a waiter goes to sleep."""

import threading
import time

import pytest

from mps_trainer.transport import names, semaphores
from mps_trainer.transport.semaphores import WakeUp


@pytest.fixture
def wake_up(run_id):
    made = WakeUp(names.space_name(run_id, 0), create=True)
    yield made
    made.close()
    semaphores.remove_semaphore(made.name)


def test_a_post_that_comes_during_the_look_is_taken_without_a_sleep(wake_up, monkeypatch):
    monkeypatch.setattr(semaphores, "LOOK_NS", 30 * 10**9)
    monkeypatch.setattr(wake_up, "_sem", NeverSleeps(wake_up._sem))
    poster = threading.Timer(0.05, wake_up.post)
    poster.start()
    assert wake_up.wait(30)
    poster.join()
    assert wake_up._sem.value == 0, "one post, one waiter"


def test_a_look_ends_after_its_time_and_the_waiter_sleeps(wake_up):
    before, begin = time.process_time(), time.monotonic()
    assert not wake_up.wait(0.2)
    assert time.monotonic() - begin >= 0.2
    assert time.process_time() - before < 0.1
    assert not wake_up.wait(0)


class NeverSleeps:
    """A semaphore that may only be taken at once."""

    def __init__(self, sem):
        self._sem = sem

    def __getattr__(self, name):
        return getattr(self._sem, name)

    def acquire(self, timeout_s):
        assert timeout_s == 0, "it went to sleep"
        self._sem.acquire(timeout_s)

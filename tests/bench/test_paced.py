"""A paced sidecar is fed no more than it can be owed."""

import threading

import pytest

from mps_trainer.bench.paced import PacedFeed
from mps_trainer.errors import RunError
from mps_trainer.run import Status


def test_a_feed_waits_until_steps_are_taken(tmp_path):
    taken = [100]
    feed = PacedFeed(tmp_path, 16, lambda: taken[0])
    feed.resume()
    for _ in range(4):
        feed.wait(lambda: True)
    late = threading.Thread(target=feed.wait, args=(lambda: True,))
    late.start()
    late.join(0.05)
    assert late.is_alive()
    taken[0] += 16
    late.join(90)
    assert not late.is_alive()
    with pytest.raises(RunError, match="has ended"):
        feed.wait(lambda: False)


def test_steps_are_owed_until_the_sidecar_says_after_the_pause_that_none_is(tmp_path):
    feed = PacedFeed(tmp_path, 16, lambda: 0)
    status = Status(run_id="r")
    status.save(tmp_path)
    feed.paused()
    assert feed.owes(), "it has said nothing since"
    status.steps_owed = 3
    status.save(tmp_path)
    assert feed.owes()
    status.steps_owed = 0
    status.save(tmp_path)
    assert not feed.owes()

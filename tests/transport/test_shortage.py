"""Descriptors run out: waited for, said once, and nothing is refused for good or leaked."""

import contextlib
import os
import resource

import pytest
from channel_peers import COLUMNS, SMALL, Child
from scenarios import drain, send

from mps_trainer.errors import TransportError
from mps_trainer.transport import OperatorChannel, SidecarHub, leftovers, shortage
from mps_trainer.transport.shortage import ShortageError

#: More than an attach needs at once, and what a test's process has open besides.
SPARE = 10


@contextlib.contextmanager
def descriptors_left(count):
    """All but `count` of the descriptors that this process may have are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd")) + SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_channel_is_attached_once_there_are_descriptors_again_and_the_shortage_is_said_once(run_id, monkeypatch):
    said = []
    monkeypatch.setattr(shortage.log, "warning", lambda text, *args: said.append(text % args))
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as first, SidecarHub(run_id, COLUMNS) as hub:
        with OperatorChannel.create(run_id, COLUMNS, SMALL) as second:
            send(first, 1)
            send(second, 2)
            before = open_descriptors()
            for left in range(3):
                with descriptors_left(left):
                    for _ in range(3):
                        hub.find_new()
                    assert (len(hub.producers()), hub.refused) == (1, {})
                assert open_descriptors() == before
            assert hub.shortages.count == 9
            assert len(said) == 1
            assert "Too many open files" in said[0]
            assert "ulimit -n" in said[0]
            with descriptors_left(0):
                # What is attached goes on meanwhile.
                assert drain(hub) == [1]
            hub.find_new()
            assert drain(hub) == [2]
            assert len(said) == 2
            with descriptors_left(0):
                hub.find_new()
            assert len(said) == 3, "a second spell is said again"
        hub.close(unlink=False)


def test_an_operator_that_finds_no_descriptor_leaves_nothing_and_destroys_nothing(run_id):
    def dead(report):
        send(OperatorChannel.create(run_id, COLUMNS, SMALL), 1)

    assert Child(dead).wait() == 0
    orphan = leftovers(run_id)
    # With each number of free descriptors another step fails, until there are enough.
    for left in range(SPARE):
        before = open_descriptors()
        said = ""
        with descriptors_left(left):
            try:
                channel = OperatorChannel.create(run_id, COLUMNS, SMALL)
            except ShortageError as error:
                said = str(error)
        if not said:
            channel.close()
            break
        assert "Too many open files" in said
        assert set(leftovers(run_id)) <= set(orphan)
        assert open_descriptors() == before
    assert 2 <= left < SPARE - 1
    with SidecarHub(run_id, COLUMNS) as hub:
        assert drain(hub) == [1], "the records of a dead operator are no price for a descriptor"
        hub.reap()
        hub.close(unlink=True)


def test_a_hub_that_finds_no_descriptor_says_so_and_starts_later(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        send(channel, 1)
        with descriptors_left(0), pytest.raises(TransportError, match=r"Too many open files(.|\n)*ulimit -n"):
            SidecarHub(run_id, COLUMNS)
        with SidecarHub(run_id, COLUMNS) as hub:
            assert drain(hub) == [1]


def test_a_lost_doorbell_is_replaced_once_there_are_descriptors_again(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel, SidecarHub(run_id, COLUMNS) as hub:
        os.unlink(f"/dev/shm/sem.mpst.{run_id}.bell")
        with descriptors_left(0):
            hub.find_new()
            send(channel, 1)
            assert drain(hub) == [1]
        hub.find_new()
        send(channel, 2)
        assert hub.wait(60.0)
        assert drain(hub) == [2]
        hub.close(unlink=False)

"""A peer that is stopped, or late, at the worst moment costs others a bounded time and nobody a record."""

import os
import signal
import threading
import time

import pytest
from channel_peers import COLUMNS, SMALL, Child, forever, pair
from scenarios import drain, send

from mps_trainer.errors import TransportError
from mps_trainer.transport import OperatorChannel, SidecarHub, leftovers, locks, names, semaphores
from mps_trainer.transport.locks import LockFile
from mps_trainer.transport.semaphores import Doorbell


def drain_for(hub, count, timeout_s=60.0):
    """`count` request ids as they come; fails when they do not."""
    seen, deadline = [], time.monotonic() + timeout_s
    while len(seen) < count:
        assert time.monotonic() < deadline, seen
        if hub.wait(0.2) and (delivery := hub.receive()) is not None:
            seen.append(delivery.header.request_id)
            delivery.release()
    return seen


def test_records_of_an_operator_that_left_before_the_sidecar_attached_are_read(run_id):
    with SidecarHub(run_id, COLUMNS) as hub:
        with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
            for i in (1, 2, 3):
                send(channel, i)
        hub.find_new()
        assert drain(hub) == [1, 2, 3]
        assert hub.reap() == 1
        hub.close(unlink=True)


def test_records_of_an_operator_that_left_between_two_sidecars_are_read(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        with SidecarHub(run_id, COLUMNS) as hub:
            send(channel, 1)
            assert drain(hub) == [1]
        send(channel, 2)
    with SidecarHub(run_id, COLUMNS) as hub:
        assert drain(hub) == [2]
        assert hub.reap() == 1
        hub.close(unlink=True)
    assert leftovers(run_id) == []


def test_an_operator_stopped_inside_the_mutex_does_not_starve_others(run_id, monkeypatch):
    def operator(report):
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL)
        send(channel, 1)
        report("sent")
        while not channel.sidecar_alive() or channel._status[0] != 1:
            channel._bell.wait(0.01)
        assert channel._writer.ring.mutex.acquire()
        report("holds the mutex")
        forever()

    child = Child(operator)
    assert child.line() == "sent"
    monkeypatch.setattr(locks, "MUTEX_S", 0.05)
    with SidecarHub(run_id, COLUMNS) as hub:
        assert child.line() == "holds the mutex"
        os.kill(child.pid, signal.SIGSTOP)
        with OperatorChannel.create(run_id, COLUMNS, SMALL) as other:
            hub.find_new()
            for i in (10, 11, 12):
                send(other, i)
            assert drain_for(hub, 3) == [10, 11, 12]
            # While it is stopped it costs a look now and then, not a busy loop.
            before = time.process_time()
            hub.wait(0.5)
            assert time.process_time() - before < 0.25
            child.kill()
            assert drain_for(hub, 1) == [1]
        hub.reap()
        hub.close(unlink=True)


@pytest.mark.usefixtures("brief_mutex")
def test_a_stop_inside_the_mutex_during_attach_is_no_refusal(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        send(channel, 1)
        assert channel._writer.ring.mutex.acquire()
        with SidecarHub(run_id, COLUMNS) as hub:
            assert (hub.refused, hub.producers()) == ({}, [])
            channel._writer.ring.mutex.release()
            hub.find_new()
            assert drain(hub) == [1]
            hub.close(unlink=False)


def hold_bell(run_id):
    """An exclusive lock on the doorbell's life byte, as its last user has it while removing it."""
    file = LockFile(os.open(names.semaphore_path(names.bell_name(run_id)), os.O_RDWR))
    assert file.try_lock(0)
    return file


def test_a_doorbell_whose_remover_is_late_is_waited_for(run_id, monkeypatch):
    monkeypatch.setattr(semaphores, "OPEN_S", 90.0)
    Doorbell(run_id).close()
    holder = hold_bell(run_id)
    timer = threading.Timer(0.1, holder.close)
    timer.start()
    bell = Doorbell(run_id)
    timer.join()
    bell.close(unlink_if_alone=True)


def test_a_doorbell_whose_remover_is_stopped_is_an_error_that_says_so(run_id, monkeypatch):
    monkeypatch.setattr(semaphores, "OPEN_S", 0.1)
    Doorbell(run_id).close()
    holder = hold_bell(run_id)
    with pytest.raises(TransportError, match=r"stopped half-way(.|\n)*resume"):
        Doorbell(run_id)
    holder.close()
    Doorbell(run_id).close(unlink_if_alone=True)


def test_a_doorbell_replaced_while_it_is_opened_is_the_one_that_others_hear(run_id, monkeypatch):
    others = []

    def racing(name, flags, real=semaphores._open):
        opened = real(name, flags)
        if not others:
            others.append(None)
            semaphores.remove_semaphore(name)
            others[0] = Doorbell(run_id)
        return opened

    monkeypatch.setattr(semaphores, "_open", racing)
    mine = Doorbell(run_id)
    other = others[0]
    mine.post()
    assert mine.inode == other.inode
    assert other.wait(0.3)
    mine.close()
    other.close(unlink_if_alone=True)


def test_a_count_of_the_doorbell_that_is_far_too_high_does_not_keep_the_hub(run_id):
    with pair(run_id) as (channel, hub):
        for _ in range(100_000):
            hub._bell.post()
        start = time.monotonic()
        assert not hub.wait(0.1)
        assert time.monotonic() - start < 2.5
        send(channel, 1)
        assert hub.wait(0.0)
        hub.receive().release()

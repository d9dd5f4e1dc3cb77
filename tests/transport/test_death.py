"""Processes that die or stop while the other side lives: noticed by locks, survived without loss or deadlock."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from channel_peers import COLUMNS, SMALL, Child, forever, pair, take
from scenarios import drain, send

from mps_trainer.transport import OperatorChannel, SidecarHub, leftovers, replies, semaphores
from mps_trainer.transport.layout import LOCK_FEED

pytestmark = pytest.mark.usefixtures("memory_order")


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        threading.Event().wait(0.005)


def idle_sidecar(run_id):
    """A child that attaches, claims one record without releasing it, and holds still."""

    def body(report):
        hub = SidecarHub(run_id, COLUMNS)
        report("attached")
        delivery = take(hub)
        report(delivery.header.request_id)
        forever()

    return Child(body)


def test_a_dead_sidecar_is_noticed_even_as_a_zombie(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        child = idle_sidecar(run_id)
        assert child.line() == "attached"
        assert channel.sidecar_alive()
        child.kill(reap=False)
        until(lambda: not channel.sidecar_alive())
        os.kill(child.pid, 0)  # it is not reaped: by its PID it still lives
        child.wait()


def test_a_dead_operator_is_noticed_even_as_a_zombie(run_id):
    def operator(report):
        OperatorChannel.create(run_id, COLUMNS, SMALL)
        report("ready")
        forever()

    with SidecarHub(run_id, COLUMNS) as hub:
        child = Child(operator)
        child.line()
        hub.find_new()
        assert hub.producers()[0].alive
        child.kill(reap=False)
        until(lambda: not hub.producers()[0].alive)
        assert hub.reap() == 1
        child.wait()
        hub.close(unlink=True)


def test_a_killed_reader_gives_its_record_back_to_its_successor(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        for i in (1, 2, 3):
            send(channel, i)
        child = idle_sidecar(run_id)
        assert child.line() == "attached"
        assert child.line() == "1"
        child.kill()
        with SidecarHub(run_id, COLUMNS) as hub:
            assert drain(hub) == [1, 2, 3]
            assert hub.producers()[0].taken.recovered == 1
            hub.close(unlink=False)
    assert leftovers(run_id) == []


def test_a_dead_sidecar_is_looked_for_within_a_second():
    # The next two tests see that a wait looks; how long after that it ends is the machine's affair.
    assert replies._LOOK_S <= semaphores.SLICE_S <= 1.0


def test_a_mutex_is_waited_for_a_moment_only():
    code = "from mps_trainer.transport import locks; print(locks.MUTEX_S)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) <= 0.1


def test_waiting_for_scores_ends_when_the_sidecar_dies(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        child = idle_sidecar(run_id)
        child.line()
        send(channel, 1, want_scores=True)
        assert child.line() == "1"
        threading.Timer(0.1, child.kill, kwargs={"reap": False}).start()
        start = time.monotonic()
        assert channel.receive_scores(1, 90.0) is None
        assert time.monotonic() - start < 60
        child.wait()


def test_waiting_for_room_ends_when_the_sidecar_dies(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure="block", block_timeout_s=90.0) as channel:
        child = idle_sidecar(run_id)
        child.line()
        for i in range(1, 5):
            send(channel, i)
        assert child.line() == "1"
        threading.Timer(0.1, child.kill, kwargs={"reap": False}).start()
        start = time.monotonic()
        assert send(channel, 5).rows_dropped == 2
        assert time.monotonic() - start < 60
        child.wait()


def test_a_restarted_sidecar_goes_on_with_a_living_operator(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        for generation in range(3):
            with SidecarHub(run_id, COLUMNS) as hub:
                send(channel, generation, want_scores=True)
                with take(hub) as delivery:
                    delivery.reply(np.full(2, generation, np.float32), generation)
                assert channel.receive_scores(generation, 1.0).model_version == generation
            assert not channel.sidecar_alive()


def test_records_of_a_killed_operator_are_still_read(run_id):
    def operator(report):
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL)
        for i in (1, 2, 3):
            send(channel, i)
        report("sent")
        forever()

    child = Child(operator)
    child.line()
    child.kill()
    with SidecarHub(run_id, COLUMNS) as hub:
        assert hub.reap() == 0
        assert drain(hub) == [1, 2, 3]
        assert hub.reap() == 1
        hub.close(unlink=True)


def test_a_reply_to_a_dead_operator_is_false(run_id):
    def operator(report):
        send(OperatorChannel.create(run_id, COLUMNS, SMALL), 1, want_scores=True)
        report("sent")
        forever()

    child = Child(operator)
    child.line()
    child.kill()
    with SidecarHub(run_id, COLUMNS) as hub:
        with take(hub) as delivery:
            assert not delivery.reply(np.zeros(2, np.float32), 1)
        assert hub.reap() == 1
        hub.close(unlink=True)


@pytest.mark.usefixtures("brief_mutex")
def test_a_peer_that_is_stopped_inside_the_mutex_costs_a_bounded_time(run_id):
    def sidecar(report):
        hub = SidecarHub(run_id, COLUMNS)
        hub.segments()[0].locks.try_lock(LOCK_FEED)
        report("holds the mutex")
        forever()

    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        child = Child(sidecar)
        child.line()
        os.kill(child.pid, signal.SIGSTOP)
        while channel.backlog() < SMALL.num_slots and send(channel, 100).rows_sent:
            pass
        timeouts = channel.counters.lock_timeouts
        # It would hang here, were there no limit.
        dropped = send(channel, 1).rows_dropped
        child.kill()
        assert dropped == 2
        assert channel.counters.lock_timeouts == timeouts + 1
        # Dying dropped the mutex.
        assert send(channel, 2).rows_sent == 2


def test_a_wakeup_that_a_killed_operator_owed_is_made_up_for(run_id):
    with pair(run_id) as (channel, hub):
        channel._post_bell = lambda: None  # killed between commit and post
        thread = threading.Timer(0.1, send, args=(channel, 1))
        thread.start()
        start = time.monotonic()
        assert hub.wait(90.0)
        assert time.monotonic() - start < 60
        take(hub).release()
        thread.join()


@pytest.mark.usefixtures("only_bells")
def test_a_doorbell_removed_by_hand_is_replaced(run_id):
    with pair(run_id) as (channel, hub):
        os.unlink(f"/dev/shm/sem.mpst.{run_id}.bell")
        hub.find_new()
        for i in range(1, 4):
            start = time.monotonic()
            timer = threading.Timer(0.1, send, args=(channel, i))
            timer.start()
            assert hub.wait(90.0)
            assert time.monotonic() - start < 60, "not rung for"
            timer.join()
            take(hub).release()


def test_a_name_removed_by_hand_and_used_again_is_another_channel(run_id):
    with pair(run_id) as (_, hub):
        for suffix in ("0", "0.s", "0.r"):
            os.unlink(f"/dev/shm/{'' if suffix == '0' else 'sem.'}mpst.{run_id}.{suffix}")
        with OperatorChannel.create(run_id, COLUMNS, SMALL) as second:
            hub.find_new()
            send(second, 5)
            assert drain(hub) == [5]

"""What a process does until it is killed, and what must hold afterwards.

Used by the tests and by scripts/kill_transport.py. Each scenario is one function `act(run_id, stepper, report)` that
runs in the doomed process and one `check(run_id, said)` that runs in a survivor. `said` are the lines that the doomed
process reported before it died.
"""

import contextlib
import unittest.mock

import numpy as np
from channel_peers import COLUMNS, SMALL, Child, assert_same, make_rows
from step_killer import LINES, Stepper

from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub, leftovers, sweep

TINY = RingSettings(num_slots=3, slot_bytes=4096, reply_slot_bytes=4096)


def rows_of(request_id):
    return make_rows(2, request_id, mean_tokens=5)


def send(channel, request_id, want_scores=False):
    return channel.send(rows_of(request_id), request_id=request_id, want_scores=want_scores)


def drain(hub):
    """All records that are there, in order, each checked byte for byte; request ids."""
    seen, last = [], {}
    while hub.wait(0.0):
        with hub.receive() as delivery:
            header = delivery.header
            assert header.seq > last.get(header.channel, 0)
            last[header.channel] = header.seq
            assert_same(delivery.batch, rows_of(header.request_id))
            seen.append(header.request_id)
    return seen


def check_usable_and_clean(run_id, hub):
    """A new operator can join, every slot of it works, and at the end nothing is left."""
    with OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure="drop_newest") as channel:
        hub.find_new()
        for i in range(2 * SMALL.num_slots):
            assert send(channel, 1000 + i).rows_sent == 2
            if i % SMALL.num_slots == SMALL.num_slots - 1:
                assert len(drain(hub)) == SMALL.num_slots
    drain(hub)
    hub.reap()
    hub.close(unlink=True)
    with unittest.mock.patch.object(sweep, "UNFINISHED_S", 0.0):
        sweep.remove_run(run_id)
    assert all(entry.endswith(".bell") for entry in leftovers(run_id))


def check_slots(channel, hub):
    """A channel that outlived a sidecar lost no slot: each holds a record at once, and a reply to each comes back."""
    hub.find_new()
    count = channel.segment.header.settings.num_slots
    for _ in range(2):
        for i in range(count):
            assert send(channel, 2000 + i, want_scores=True).rows_sent == 2, f"slot {i} of {count} is lost"
        assert channel.backlog() == count
        for i in range(count):
            with hub.receive() as delivery:
                assert delivery.header.request_id == 2000 + i
                assert delivery.reply(np.full(2, i, np.float32), 1)
        assert channel.backlog() == 0
        for i in range(count):
            assert channel.receive_scores(2000 + i, 1.0).values.tolist() == [i, i]


def writer_act(run_id, stepper, report):
    """An operator without a sidecar: creates, sends more than fits, closes."""
    with stepper, contextlib.ExitStack() as stack:
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL)
        # Close only at the end: an exception on the way is a failure of the scenario, not a step.
        stack.callback(channel.close)
        for i in range(1, SMALL.num_slots + 2):
            send(channel, i)
            report(i)
        stack.pop_all().close()
    report("done")


def writer_check(run_id, said):
    """Everything that was reported as sent is there, but for what drop_oldest removed, and nothing else is."""
    sent = [int(line) for line in said if line.isdigit()]
    with SidecarHub(run_id, COLUMNS) as hub:
        seen = drain(hub)
        newest = seen[-1] if seen else 0
        assert newest in (max(sent, default=0), max(sent, default=0) + 1)
        assert seen == list(range(newest - len(seen) + 1, newest + 1))
        # One slot may be free: a record was evicted for one that was not committed any more.
        assert len(seen) >= min(newest, SMALL.num_slots - 1)
        check_usable_and_clean(run_id, hub)


def reader_act(run_id, stepper, report):
    """A sidecar: attaches, reads, replies, releases, looks for more, detaches."""
    with stepper:
        hub = SidecarHub(run_id, COLUMNS)
        while hub.wait(0.0):
            with hub.receive() as delivery:
                assert_same(delivery.batch, rows_of(delivery.header.request_id))
                delivery.reply(np.full(2, delivery.header.request_id, np.float32), 1)
                request_id = delivery.header.request_id
            report(request_id)
        hub.producers()
        hub.reap()
        hub.close(unlink=False)
    report("done")


def reader_check(channel, run_id, said):
    """What was not acknowledged comes again, in order; nothing is lost; replies that arrived are right."""
    acknowledged = [int(line) for line in said if line.isdigit()]
    assert not channel.sidecar_alive()
    with SidecarHub(run_id, COLUMNS) as hub:
        seen = drain(hub)
        # The last acknowledgement may have happened without its report.
        first = len(acknowledged) + 1
        assert seen in (list(range(first, 4)), list(range(first + 1, 4)))
        assert channel.backlog() == 0
        check_slots(channel, hub)
        for request_id in acknowledged:
            scores = channel.receive_scores(request_id, 1.0)
            assert scores.values.tolist() == [request_id, request_id]
        channel.close()
        check_usable_and_clean(run_id, hub)


def both_act(run_id, stepper, report):
    """Both ends in one process: a scored batch of several parts and a clean end."""
    with stepper:
        channel = OperatorChannel.create(run_id, COLUMNS, TINY)
        hub = SidecarHub(run_id, COLUMNS)
        rows = make_rows(8, 5, mean_tokens=100)
        assert channel.send(rows, request_id=5, want_scores=True).parts > 1
        while hub.wait(0.0):
            with hub.receive() as delivery:
                delivery.reply(delivery.batch["reward"].values.copy(), 1)
        scores = channel.receive_scores(5, 1.0)
        np.testing.assert_array_equal(scores.values, rows["reward"])
        channel.close()
        hub.reap()
        hub.close(unlink=True)
    report("done")


def both_check(run_id, said):
    """Whatever is left does not stop a successor, and goes away."""
    with SidecarHub(run_id, COLUMNS) as hub:
        while hub.wait(0.0):
            hub.receive().release()
        check_usable_and_clean(run_id, hub)


def run_until(act, run_id, stop_at, said, *, steps=LINES, repeats=1, meanwhile=None):
    """Run `act` in a child until step `stop_at`, and `meanwhile(child)` here; True when it was killed there."""

    def body(report):
        stepper = Stepper(stop_at, steps=steps, repeats=repeats)
        act(run_id, stepper, report)
        report(f"steps {stepper.count}")

    child = Child(body)
    if meanwhile is not None:
        meanwhile(child)
    status = child.wait()
    said += child.said
    assert status in (0, -9), said
    return status == -9


def reader_trial(run_id, stop_at, said, **steps):
    with OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure="drop_newest") as channel:
        for i in (1, 2, 3):
            send(channel, i, want_scores=True)
        killed = run_until(reader_act, run_id, stop_at, said, **steps)
        reader_check(channel, run_id, said)
    return killed


def writer_trial(run_id, stop_at, said, **steps):
    killed = run_until(writer_act, run_id, stop_at, said, **steps)
    writer_check(run_id, said)
    return killed


def both_trial(run_id, stop_at, said, **steps):
    killed = run_until(both_act, run_id, stop_at, said, **steps)
    both_check(run_id, said)
    return killed


TRIALS = {"writer": writer_trial, "reader": reader_trial, "both": both_trial}

"""Kills while the other side lives, or is itself stopped inside a step: send, receive, release, reply, take the reply.

    operator   the operator dies at a step, a living sidecar serves it meanwhile
    sidecar    the sidecar dies at a step, a living operator sends and waits for scores meanwhile
    pair       each is stopped inside a step; then one is killed and the other goes on, or both are killed

Like `scenarios`, used by the tests and by scripts/kill_transport.py.
"""

import contextlib
import functools
import os
import unittest.mock

import numpy as np
from channel_peers import COLUMNS, SMALL, Child, assert_same
from scenarios import check_slots, check_usable_and_clean, drain, rows_of, run_until, send
from step_killer import Stepper

from mps_trainer.transport import OperatorChannel, SidecarHub, replies

RECORDS = 3


def ids(said, word):
    """Request ids that a process reported as `word <id>`."""
    return [int(line.split()[1]) for line in said if line.startswith(f"{word} ")]


def serve_one(hub, report):
    """Take a record, check and answer it; report it before its release, as the journal does."""
    with hub.receive() as delivery:
        request_id = delivery.header.request_id
        assert_same(delivery.batch, rows_of(request_id))
        delivery.reply(np.full(2, request_id, np.float32), 1)
        report(f"seen {request_id}")


def operator_act(run_id, stepper, report):
    """Send and wait for the scores, three times, and close."""
    with stepper:
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure="block", block_timeout_s=60.0)
        for i in range(1, RECORDS + 1):
            while not send(channel, i, want_scores=True).rows_sent:
                assert channel.counters.lock_timeouts
            report(f"sent {i}")
            assert channel.receive_scores(i, 60.0).values.tolist() == [i, i]
            report(f"scored {i}")
        channel.close()
    report("done")


def operator_trial(run_id, stop_at, said, **steps):
    seen = []
    with SidecarHub(run_id, COLUMNS) as hub:

        def serve(child):
            while not child.ended:
                if hub.wait(0.01):
                    serve_one(hub, seen.append)

        killed = run_until(operator_act, run_id, stop_at, said, meanwhile=serve, **steps)
        hub.find_new()
        seen = ids(seen, "seen") + drain(hub)
        sent = ids(said, "sent")
        assert seen in (sent, [*sent, len(sent) + 1]), (sent, seen)
        check_usable_and_clean(run_id, hub)
    return killed


def sidecar_act(run_id, stepper, report):
    """Attach, serve three records as they come, close."""
    with stepper:
        hub = SidecarHub(run_id, COLUMNS)
        for _ in range(RECORDS):
            assert hub.wait(60.0)
            serve_one(hub, report)
        hub.close(unlink=False)
    report("done")


def sidecar_trial(run_id, stop_at, said, **steps):
    committed, scored = [], []
    with OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure="block", block_timeout_s=60.0) as channel:

        def feed(child):
            while not (child.ended or channel.sidecar_alive()):
                channel._bell.wait(0.001)
            while not child.ended and len(committed) < RECORDS:
                request_id = len(committed) + 1
                timeouts = channel.counters.lock_timeouts
                if not send(channel, request_id, want_scores=True).rows_sent:
                    # A sidecar that was preempted inside the mutex for longer than its limit; it takes longer in here.
                    assert channel.counters.lock_timeouts > timeouts
                    continue
                committed.append(request_id)
                scores = channel.receive_scores(request_id, 60.0)
                if scores is not None:
                    assert scores.values.tolist() == [request_id, request_id]
                    scored.append(request_id)

        with unittest.mock.patch.object(replies, "_LOOK_S", 0.01):
            killed = run_until(sidecar_act, run_id, stop_at, said, meanwhile=feed, **steps)
        seen = ids(said, "seen")
        with SidecarHub(run_id, COLUMNS) as hub:
            rest = drain(hub)
            # Each record once, and the last one that was seen a second time if its release is missing.
            assert seen + rest in (committed, [*seen, *committed[len(seen) - 1 :]]), (committed, seen, rest)
            assert killed or (scored, rest) == (committed, [])
            check_slots(channel, hub)
            channel.close()
            check_usable_and_clean(run_id, hub)
    return killed


class Paused:
    """A child that runs `act` up to a step and stops there until `go`, or to its end."""

    def __init__(self, act, run_id, stop_at, **steps):
        wake, self._wake = os.pipe()

        def body(report):
            def pause():
                report("paused")
                os.read(wake, 1)

            stepper = Stepper(stop_at, at_stop=pause, **steps)
            act(run_id, stepper, report, pause)
            report(f"steps {stepper.count}")

        self._child = Child(body)
        os.close(wake)

    def stopped(self):
        """Wait until it stands or has ended."""
        while (line := self._child.line()) and line != "paused":
            pass

    def go_on(self):
        """Let it go on to where it stops next."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            os.write(self._wake, b"g")

    def end(self, *, kill):
        """Kill it, or let it go on to its end; what it said."""
        if kill:
            self._child.kill()
        else:
            self.go_on()
            assert self._child.wait() == 0, self._child.said
        os.close(self._wake)
        return self._child.said


def pair_writer(run_id, stepper, report, pause, *, early):
    """An operator: `early` records and a stop before its first step, then more than fit, replies and the close."""
    channel = OperatorChannel.create(run_id, COLUMNS, SMALL) if early else None
    for i in range(1, early + 1):
        report(f"sent {i} {send(channel, i, want_scores=True).rows_evicted // 2}")
    if early:
        pause()
    with stepper:
        channel = channel or OperatorChannel.create(run_id, COLUMNS, SMALL)
        for i in range(early + 1, early + SMALL.num_slots + 2):
            result = send(channel, i, want_scores=True)
            report(f"{'sent' if result.rows_sent else 'dropped'} {i} {result.rows_evicted // 2}")
            scores = channel.receive_scores(i - 1, 0.0)
            assert scores is None or scores.values.tolist() == [i - 1, i - 1]
        channel.close()
    report("done")


def pair_reader(run_id, stepper, report, pause):
    """A sidecar: attaches, serves what is there, looks for more, reaps, leaves."""
    with stepper:
        hub = SidecarHub(run_id, COLUMNS)
        for _ in range(2):
            while hub.wait(0.0):
                delivery = hub.receive()
                if delivery is None:
                    break
                with delivery:
                    request_id = delivery.header.request_id
                    assert_same(delivery.batch, rows_of(request_id))
                    delivery.reply(np.full(2, request_id, np.float32), 1)
                    report(f"seen {request_id}")
            hub.find_new()
            hub.reap()
        hub.close(unlink=False)
    report("done")


def pair_trial(run_id, writer_at, reader_at, dies, *, reader_first, **steps):
    """Stop the writer at one step and the reader at another, kill one ("writer", "reader") or "both", check.

    `reader_first`: the reader stops inside a step over three records before the writer's first step, so that the
    writer runs with the reader inside; else the other way round. Returns whether writer and reader got so far.
    """
    early = 3 if reader_first else 0

    writer = Paused(functools.partial(pair_writer, early=early), run_id, writer_at, **steps)
    writer.stopped()
    reader = Paused(pair_reader, run_id, reader_at, **steps)
    reader.stopped()
    if reader_first:
        writer.go_on()
        writer.stopped()
    order = (writer, reader) if dies == "writer" else (reader, writer)
    said = [process.end(kill=i == 0 or dies == "both") for i, process in enumerate(order)]
    written, read = said if order[0] is writer else reversed(said)
    check_pair(run_id, written, read)
    return "paused" in (written[early + 1 :] if early else written), "paused" in read


def check_pair(run_id, written, read):
    """Each record that was reported as sent was seen, is there, or is one of the counted evictions."""
    sent, seen = ids(written, "sent"), ids(read, "seen")
    evicted = sum(int(line.split()[2]) for line in written if line.startswith(("sent ", "dropped ")))
    finished = any(line.startswith("steps ") for line in written)
    in_flight = max([*sent, *ids(written, "dropped"), 0]) + 1
    with SidecarHub(run_id, COLUMNS) as hub:
        rest = drain(hub)
        missing = set(sent) - set(seen) - set(rest)
        assert evicted <= len(missing) <= evicted + (not finished), (written, read, rest)
        # The oldest go first, but never the one that a reader holds.
        free = rest[1:] if missing and rest and rest[0] < min(missing) else rest
        assert all(i < min(free, default=in_flight) for i in missing), (missing, rest)
        assert set(seen + rest) <= {*sent, in_flight}, (written, read, rest)
        assert len(seen) == len(set(seen))
        assert seen == sorted(seen)
        check_usable_and_clean(run_id, hub)


EXCHANGES = {"operator beside a sidecar": operator_trial, "sidecar beside an operator": sidecar_trial}

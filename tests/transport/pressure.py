"""Kills under back-pressure: every record is delivered or counted as dropped, exactly, however slow the reader is.

Used by test_pressure.py and by scripts/kill_transport.py.
"""

import time

from channel_peers import COLUMNS, SMALL, Child, assert_same, take
from scenarios import check_slots, check_usable_and_clean, drain, rows_of, send

from mps_trainer.transport import OperatorChannel, SidecarHub

POLICIES = ("drop_oldest", "drop_newest", "block")
#: Slower than the writer by far, so that the ring is full most of the time.
READ_S, WRITE_S = 0.002, 0.0003


def writer(run_id, policy, first):
    """Sends numbered records without end and reports what became of each: "<id> <sent> <evicted before it>"."""

    def body(report):
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure=policy, block_timeout_s=READ_S / 4)
        report("ready")
        request_id = first
        while True:
            result = send(channel, request_id)
            assert result.rows_sent + result.rows_dropped == 2
            assert result.rows_evicted % 2 == 0
            counted = channel.counters
            assert counted.records_sent + counted.dropped_newest == request_id - first + 1
            report(f"{request_id} {int(result.rows_sent > 0)} {counted.dropped_oldest}")
            request_id += 1
            time.sleep(WRITE_S)

    return Child(body)


def reader(run_id):
    """A slow sidecar: checks what it reads and reports each record before it releases it, as the journal does."""

    def body(report):
        with SidecarHub(run_id, COLUMNS) as hub:
            report("ready")
            while True:
                with take(hub) as delivery:
                    assert_same(delivery.batch, rows_of(delivery.header.request_id))
                    time.sleep(READ_S)
                    report(str(delivery.header.request_id))

    return Child(body)


def numbers(child):
    """What a reader read."""
    return [int(line) for line in child.said if line.isdigit()]


def history(child):
    """(ids sent, ids that found no room, records evicted, how many attempts were reported) of a writer."""
    lines = [[int(word) for word in line.split()] for line in child.said if line[0].isdigit()]
    sent = [line[0] for line in lines if line[1]]
    return sent, [line[0] for line in lines if not line[1]], lines[-1][2] if lines else 0, len(lines)


def pressure_trial(run_id, policy, rng):
    """A writer and a slow reader; the reader is killed now and then, at last the writer, and all is added up."""
    sender = writer(run_id, policy, 1)
    assert sender.line() == "ready"
    readers = []
    for _ in range(rng.choice([1, 2, 3])):
        readers.append(reader(run_id))
        assert readers[-1].line() == "ready"
        time.sleep(rng.uniform(0.0, 0.03))
        if rng.random() < 0.8:
            readers[-1].kill()
        else:
            break
    time.sleep(rng.uniform(0.0, 0.01))
    sender.kill()
    readers[-1].kill()
    for child in (sender, *readers):
        child.wait()
    read = [numbers(child) for child in readers]
    with SidecarHub(run_id, COLUMNS) as hub:
        rest = drain(hub)
        totals = add_up(policy, history(sender), read, rest)
        check_usable_and_clean(run_id, hub)
    return totals


def add_up(policy, written, read, rest):
    """Compare what the writer says it did with what was delivered. Only the send that a kill cut short is open."""
    sent, dropped, evicted, attempts = written
    delivered = [i for one in read for i in one] + rest
    again = len(delivered) - len(set(delivered))
    in_flight = attempts + 1
    missing = set(sent) - set(delivered)
    text = f"{policy}: sent {sent}, dropped {dropped}, evicted {evicted}, read {read}, rest {rest}"
    assert sorted(sent + dropped) == list(range(1, in_flight)), text
    assert set(delivered) <= {*sent, in_flight}, f"a record that was counted as dropped was delivered; {text}"
    # The kill may have come after an eviction and before its report.
    assert len(missing) in ((evicted, evicted + 1) if policy == "drop_oldest" else (0,)), f"missing {missing}; {text}"
    assert policy == "drop_oldest" or evicted == 0
    assert policy != "drop_oldest" or not dropped or len(dropped) <= len(read), text
    # A reader that dies between its report and its release leaves one record to be delivered again.
    assert again <= len(read), text
    for one in (*read, rest):
        assert one == sorted(one), text
    return {
        "attempts": attempts,
        "sent": len(sent),
        "evicted": evicted,
        "found no room": len(dropped),
        "delivered": len(set(delivered)),
        "read again": again,
        "lost": 0,
    }


def exact_trial(run_id, policy, rng):
    """The writer lives in this process, so that nothing is open: sent is delivered plus evicted, to the record."""
    with OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure=policy, block_timeout_s=READ_S / 4) as channel:
        sent, readers, request_id = [], [], 0
        for _ in range(3):
            readers.append(reader(run_id))
            assert readers[-1].line() == "ready"
            for _ in range(rng.randrange(20, 40)):
                request_id += 1
                if send(channel, request_id).rows_sent:
                    sent.append(request_id)
                time.sleep(WRITE_S)
            readers[-1].kill()
        # On a loaded machine the writer may have been the slower one; nobody reads now, so the ring gets full anywhere.
        for _ in range(SMALL.num_slots + 1):
            request_id += 1
            if send(channel, request_id).rows_sent:
                sent.append(request_id)
        with SidecarHub(run_id, COLUMNS) as hub:
            delivered = {i for child in readers for i in numbers(child)} | set(drain(hub))
            counted = channel.counters
            assert delivered <= set(sent)
            assert (counted.records_sent, counted.dropped_newest) == (len(sent), request_id - len(sent))
            assert len(delivered) + counted.dropped_oldest == len(sent)
            assert 2 * counted.dropped_oldest == counted.rows_dropped_oldest
            lost_room = counted.dropped_oldest if policy == "drop_oldest" else counted.dropped_newest
            assert lost_room > 0, "the reader was not slow enough"
            check_slots(channel, hub)
            channel.close()
            check_usable_and_clean(run_id, hub)

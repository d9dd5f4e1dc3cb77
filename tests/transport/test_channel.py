"""One channel in good times: order, policies when full, splitting, scores, several operators, waiting."""

import gc
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from channel_peers import COLUMNS, SMALL, Child, assert_same, forever, make_rows, pair, take

from mps_trainer.columns import Column
from mps_trainer.errors import ConfigError, ExperienceError, TransportError
from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub, leftovers, locks

pytestmark = pytest.mark.usefixtures("memory_order")


def send(channel, request_id, n=3, want_scores=False):
    rows = make_rows(n, request_id)
    return channel.send(rows, request_id=request_id, want_scores=want_scores), rows


def test_rows_arrive_as_they_were_sent(run_id):
    with pair(run_id) as (channel, hub):
        before_ns = time.monotonic_ns()
        result, rows = send(channel, 7, n=5)
        assert (result.parts, result.parts_sent, result.rows_sent, result.rows_dropped) == (1, 1, 5, 0)
        with take(hub) as delivery:
            header = delivery.header
            assert (header.request_id, header.part, header.parts, header.num_rows) == (7, 0, 1, 5)
            assert (header.seq, header.want_scores, header.channel) == (1, False, channel.name)
            assert before_ns < header.sent_ns < time.monotonic_ns()
            assert_same(delivery.batch, rows)
            assert not delivery.batch["reward"].values.flags.writeable
        assert channel.counters.records_sent == 1
        assert channel.backlog() == 0


def test_payload_is_the_record_as_the_journal_stores_it(run_id):
    from mps_trainer.transport import decode_batch, encode_batch

    with pair(run_id) as (channel, hub):
        _, rows = send(channel, 1)
        with take(hub) as delivery:
            raw = bytes(delivery.payload)
        assert raw == encode_batch(rows, COLUMNS)
        assert_same(decode_batch(raw, COLUMNS), rows)


def test_order_survives_reuse_of_slots(run_id):
    with pair(run_id) as (channel, hub):
        seen = []
        for request_id in range(1, 30):
            send(channel, request_id)
            if request_id % 3 == 0:
                for _ in range(3):
                    with take(hub) as delivery:
                        seen.append(delivery.header.request_id)
        assert seen == sorted(seen)
        assert len(seen) == 27


def test_an_empty_hub_waits_for_its_limit_and_not_longer(run_id):
    with pair(run_id) as (_, hub):
        start = time.monotonic()
        assert not hub.wait(0.2)
        assert 0.15 < time.monotonic() - start < 30
        assert hub.receive() is None


def test_a_waiting_hub_uses_no_processor(run_id):
    with pair(run_id) as (_, hub):
        before = time.process_time()
        hub.wait(1.5)
        assert time.process_time() - before < 0.3


def test_wake_ends_a_wait(run_id):
    with pair(run_id) as (_, hub):
        timer = threading.Timer(0.1, hub.wake)
        timer.start()
        start = time.monotonic()
        assert not hub.wait(90.0)
        assert time.monotonic() - start < 60
        timer.join()
        assert not hub.wait(0.0)


def test_drop_oldest_keeps_the_newest_and_counts_the_rest(run_id):
    with pair(run_id) as (channel, hub):
        results = [send(channel, i)[0] for i in range(1, 8)]
        assert [r.rows_evicted for r in results] == [0, 0, 0, 0, 3, 3, 3]
        assert [take(hub).header.request_id for _ in range(4)] == [4, 5, 6, 7]
        assert (channel.counters.dropped_oldest, channel.counters.rows_dropped_oldest) == (3, 9)
        assert channel.counters.dropped_newest == 0


def test_drop_oldest_never_drops_what_is_being_read(run_id):
    with pair(run_id) as (channel, hub):
        _, rows = send(channel, 1)
        with take(hub) as delivery:
            for i in range(2, 12):
                send(channel, i)
            assert_same(delivery.batch, rows)
        assert [take(hub).header.request_id for _ in range(3)] == [9, 10, 11]


def test_drop_oldest_with_every_slot_being_read_drops_the_newest(run_id):
    with pair(run_id) as (channel, hub):
        for i in range(4):
            send(channel, i)
        held = [take(hub) for _ in range(4)]
        assert send(channel, 5)[0].rows_dropped == 3
        assert channel.counters.dropped_newest == 1
        for delivery in held:
            delivery.release()
        assert send(channel, 6)[0].rows_sent == 3


def test_drop_newest_keeps_the_oldest_and_counts_the_rest(run_id):
    with pair(run_id, backpressure="drop_newest") as (channel, hub):
        results = [send(channel, i)[0] for i in range(1, 8)]
        assert [r.rows_dropped for r in results] == [0, 0, 0, 0, 3, 3, 3]
        assert [take(hub).header.request_id for _ in range(4)] == [1, 2, 3, 4]
        assert (channel.counters.dropped_newest, channel.counters.rows_dropped_newest) == (3, 9)


def test_block_waits_for_room_and_no_longer_than_its_limit(run_id):
    with pair(run_id, backpressure="block", block_timeout_s=0.2) as (channel, _):
        for i in range(4):
            send(channel, i)
        start = time.monotonic()
        assert send(channel, 5)[0].rows_dropped == 3
        assert 0.15 < time.monotonic() - start < 30
        assert channel.counters.blocked_s > 0.15


def test_block_goes_on_when_there_is_room(run_id):
    with pair(run_id, backpressure="block", block_timeout_s=90.0) as (channel, hub):
        for i in range(4):
            send(channel, i)
        timer = threading.Timer(0.05, lambda: take(hub).release())
        timer.start()
        assert send(channel, 6)[0].rows_sent == 3
        timer.join()


def test_block_does_not_wait_for_a_sidecar_that_is_not_there(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure="block", block_timeout_s=90.0) as channel:
        start = time.monotonic()
        for i in range(6):
            send(channel, i)
        assert time.monotonic() - start < 60
        assert channel.counters.dropped_newest == 2


def test_a_slow_reader_loses_nothing_under_block(run_id):
    def operator(report):
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure="block", block_timeout_s=90.0)
        sleep = channel._space.wait

        def first_sleep(timeout_s):
            channel._space.wait = sleep
            report("waits for room")
            return sleep(timeout_s)

        channel._space.wait = first_sleep
        report("ready")
        for i in range(1, 40):
            send(channel, i)
        report(f"{channel.counters.dropped_newest} {channel.counters.blocked_ns > 0}")
        channel.close()

    with SidecarHub(run_id, COLUMNS) as hub:
        child = Child(operator)
        assert child.line() == "ready"
        seen = []
        while len(seen) < 39:
            with take(hub) as delivery:
                seen.append(delivery.header.request_id)
                if len(seen) == 1:
                    assert child.line() == "waits for room"
                hub._bell.wait(0.002)  # a slow reader
        assert seen == list(range(1, 40))
        assert child.line() == "0 True"
        assert child.wait() == 0
        hub.close(unlink=True)


def test_a_batch_larger_than_a_slot_is_split(run_id):
    with pair(run_id) as (channel, hub):
        rows = make_rows(40, 3, mean_tokens=100)
        result = channel.send(rows, request_id=3, want_scores=False)
        assert result.parts > 1
        assert result.parts_sent == result.parts
        first = 0
        for part in range(result.parts):
            with take(hub) as delivery:
                assert (delivery.header.part, delivery.header.first_row) == (part, first)
                assert_same(delivery.batch, rows, first)
                first += delivery.header.num_rows
        assert first == 40


@pytest.mark.parametrize("policy", ["block", "drop_oldest"])
def test_a_batch_larger_than_the_ring_flows_through_a_reader(run_id, policy):
    def operator(report):
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure=policy, block_timeout_s=90.0)
        report("ready")
        result = channel.send(make_rows(200, 3, mean_tokens=100), request_id=3, want_scores=True)
        scores = channel.receive_scores(3, 90.0)
        np.testing.assert_array_equal(scores.values, np.arange(200, dtype=np.float32))
        report(f"{result.parts} {result.rows_dropped} {result.rows_evicted}")
        channel.close()

    with SidecarHub(run_id, COLUMNS) as hub:
        child = Child(operator)
        assert child.line() == "ready"
        rows, first = make_rows(200, 3, mean_tokens=100), 0
        while first < 200:
            with take(hub) as delivery:
                assert delivery.header.first_row == first
                assert_same(delivery.batch, rows, first)
                values = np.arange(first, first + delivery.header.num_rows, dtype=np.float32)
                assert delivery.reply(values, 1)
                first += delivery.header.num_rows
        parts, dropped, evicted = map(int, child.line().split())
        assert parts > SMALL.num_slots
        assert (dropped, evicted) == (0, 0)
        assert child.wait() == 0
        hub.close(unlink=True)


def test_a_batch_larger_than_the_ring_with_no_reader_is_counted(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL, block_timeout_s=0.01) as channel:
        result = channel.send(make_rows(200, 3, mean_tokens=100), request_id=3, want_scores=False)
        assert result.parts_sent == 4
        assert result.rows_sent + result.rows_dropped == 200


def test_a_row_larger_than_a_slot_is_an_error_that_names_the_setting(run_id):
    tight = RingSettings(num_slots=2, slot_bytes=4096, reply_slots=2, reply_slot_bytes=4096)
    with pair(run_id, tight) as (channel, hub):
        rows = make_rows(2)
        rows["tokens"][1] = np.zeros(4000, np.int32)
        with pytest.raises(TransportError, match="ring_slot"):
            channel.send(rows, request_id=1, want_scores=False)
        assert channel.counters.oversize == 1
        assert hub.receive() is None


def test_scores_come_back_in_the_order_of_the_rows(run_id):
    with pair(run_id) as (channel, hub):
        result = channel.send(make_rows(50, 1, mean_tokens=100), request_id=9, want_scores=True)
        assert result.parts > 1
        for part in range(result.parts):
            with take(hub) as delivery:
                assert delivery.reply(
                    delivery.batch["reward"].values * 2, model_version=10 - part, trained_ns=90 - part
                )
        scores = channel.receive_scores(9, 1.0)
        np.testing.assert_array_equal(scores.values, make_rows(50, 1, mean_tokens=100)["reward"] * 2)
        assert scores.model_version == 10 - (result.parts - 1)
        assert scores.trained_ns == 90 - (result.parts - 1), "as old as its oldest part"
        assert scores.sidecar_ns > 0
        assert channel.receive_scores(9, 1.0) is None


def test_scores_that_do_not_come_end_the_wait(run_id):
    with pair(run_id) as (channel, hub):
        send(channel, 1, want_scores=True)
        start = time.monotonic()
        assert channel.receive_scores(1, 0.2) is None
        assert 0.15 < time.monotonic() - start < 30
        with take(hub) as late:
            assert late.reply(np.zeros(3, np.float32), 1)
        send(channel, 2, want_scores=True)
        with take(hub) as delivery:
            delivery.reply(np.ones(3, np.float32), 1)
        assert channel.receive_scores(2, 1.0).values.tolist() == [1, 1, 1]
        assert channel.counters.replies_late == 1


def test_nobody_waits_for_the_scores_of_a_dropped_batch(run_id):
    with pair(run_id) as (channel, _):
        for i in range(1, 6):
            send(channel, i, want_scores=True)
        start = time.monotonic()
        assert channel.receive_scores(1, 90.0) is None
        assert time.monotonic() - start < 60


def test_replies_that_nobody_fetches_make_room_for_newer_ones(run_id):
    with pair(run_id) as (channel, hub):
        for i in range(1, 5):
            send(channel, i, want_scores=True)
        for i in range(1, 5):
            with take(hub) as delivery:
                for version in (i, 10 * i):
                    assert delivery.reply(np.full(3, i, np.float32), version)
        assert channel.receive_scores(4, 1.0).model_version == 40
        assert hub.producers()[0].taken.replies_dropped == 4
        assert channel.receive_scores(1, 0.1) is None


def test_a_reply_must_be_one_float32_a_row(run_id):
    with pair(run_id) as (channel, hub):
        send(channel, 1, want_scores=True)
        with take(hub) as delivery:
            for wrong in (np.zeros(2, np.float32), np.zeros(3), np.zeros((3, 1), np.float32)):
                with pytest.raises(ExperienceError, match="3 rows"):
                    delivery.reply(wrong, 1)


def test_threads_wait_for_different_requests_at_once(run_id):
    with pair(run_id) as (channel, hub):
        got = {}

        def wait_for(request_id):
            got[request_id] = channel.receive_scores(request_id, 90.0).values[0]

        for i in range(1, 5):
            send(channel, i, want_scores=True)
        threads = [threading.Thread(target=wait_for, args=(i,)) for i in range(1, 5)]
        for thread in threads:
            thread.start()
        for delivery in [take(hub) for _ in range(4)][::-1]:
            delivery.reply(np.full(3, delivery.header.request_id, np.float32), 1)
            delivery.release()
        for thread in threads:
            thread.join(90.0)
        assert got == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


def test_two_operators_and_one_of_them_killed(run_id):
    def operator(report):
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure="block", block_timeout_s=90.0)
        report(channel.name)
        for i in range(1, 1000):
            send(channel, i)

    with SidecarHub(run_id, COLUMNS) as hub:
        victim, other = Child(operator), Child(operator)
        counts = {victim.line(): 0}
        dead = next(iter(counts))
        counts[other.line()] = 0
        assert len(counts) == 2
        while max(counts.values()) < 999:
            with take(hub) as delivery:
                counts[delivery.header.channel] += 1
                assert delivery.header.request_id == counts[delivery.header.channel]
            if counts[dead] == 40 and delivery.header.channel == dead:
                victim.kill()
        assert 40 <= counts[dead] <= 40 + SMALL.num_slots
        assert other.wait() == 0
        assert hub.reap() == 2
        assert hub.producers() == []
        hub.close(unlink=True)


def test_operators_that_come_and_go_leave_no_mapping_and_no_descriptor(run_id):
    def held():
        return Path("/proc/self/maps").read_text().count(f"mpst.{run_id}"), len(os.listdir("/proc/self/fd"))

    gc.collect()
    with SidecarHub(run_id, COLUMNS) as hub:
        before = held()
        for i in range(30):
            with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
                send(channel, i)
                with take(hub) as delivery:
                    delivery.reply(np.zeros(3, np.float32), 1)
            del delivery, channel
            assert hub.reap() == 1
            gc.collect()
        assert held() == before
        hub.close(unlink=True)


def test_the_oldest_record_of_all_channels_comes_first(run_id):
    with pair(run_id) as (one, hub), OperatorChannel.create(run_id, COLUMNS, SMALL) as two:
        for i, channel in enumerate([one, two, two, one, two, one]):
            send(channel, i)
        hub.find_new()
        assert [take(hub).header.request_id for _ in range(6)] == list(range(6))


@pytest.mark.usefixtures("only_bells")
def test_a_new_operator_is_found_at_once_by_a_sleeping_hub(run_id):
    def operator(report):
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL)
        send(channel, 1, want_scores=True)
        report(channel.receive_scores(1, 90.0) is not None)
        channel.close()

    with SidecarHub(run_id, COLUMNS) as hub:
        child = Child(operator)
        with take(hub) as delivery:
            assert time.monotonic_ns() - delivery.header.sent_ns < 60e9, "not rung for"
            assert delivery.reply(np.zeros(3, np.float32), 1)
        assert child.line() == "True"
        assert child.wait() == 0
        hub.close(unlink=True)


def test_columns_that_differ_are_refused_by_name_on_both_sides(run_id):
    other = [
        *COLUMNS[:2],
        Column(name="tokens", source="tokens", dtype="int64", shape=(None,), maximum=9),
        *COLUMNS[3:],
    ]
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel, SidecarHub(run_id, other) as hub:
        assert "tokens" in hub.refused[channel.name]
        with pytest.raises(TransportError, match=r"tokens.*int32.*int64"):
            send(channel, 1)
        hub.close(unlink=False)
        # A sidecar with the right columns takes the same channel over.
        with SidecarHub(run_id, COLUMNS) as right:
            send(channel, 2)
            take(right).release()


def test_a_column_more_is_refused_by_name(run_id):
    with (
        OperatorChannel.create(run_id, COLUMNS, SMALL) as channel,
        SidecarHub(run_id, COLUMNS[:-1]),
        pytest.raises(TransportError, match=r"feature.*only in the operator"),
    ):
        send(channel, 1)


def test_two_sidecars_on_one_run_are_refused(run_id):
    with pair(run_id), pytest.raises(TransportError, match="already has a sidecar"):
        SidecarHub(run_id, COLUMNS, attach_timeout_s=0.1)


def test_close_is_idempotent_and_send_after_it_an_error(run_id):
    channel = OperatorChannel.create(run_id, COLUMNS, SMALL)
    channel.close()
    channel.close()
    assert leftovers(run_id) == []
    with pytest.raises(TransportError, match="closed"):
        send(channel, 1)
    hub = SidecarHub(run_id, COLUMNS)
    hub.close(unlink=True)
    hub.close(unlink=True)
    for use in (hub.receive, lambda: hub.wait(0.0)):
        with pytest.raises(TransportError, match="closed"):
            use()


def test_a_closed_channel_is_drained_and_reaped(run_id):
    with SidecarHub(run_id, COLUMNS) as hub:
        with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
            hub.find_new()
            send(channel, 1)
        assert hub.reap() == 0
        assert not hub.producers()[0].alive
        assert hub.producers()[0].sent.records_sent == 1
        take(hub).release()
        assert hub.reap() == 1
        hub.close(unlink=True)


def test_a_forked_child_can_neither_use_nor_keep_alive_its_parents_channel(run_id):
    def operator(report):
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL)
        grandchild = os.fork()
        if grandchild:
            report(grandchild)
        else:
            try:
                send(channel, 1)
            except TransportError as error:
                report(error.message)
        forever()

    with SidecarHub(run_id, COLUMNS) as hub:
        child = Child(operator)
        said = {child.line(), child.line()}
        grandchild = int(next(text for text in said if text.isdigit()))
        assert any("forked" in text for text in said)
        hub.find_new()
        assert hub.producers()[0].alive
        child.kill(reap=False)
        # The grandchild lives and has the mapping, yet the operator counts as gone.
        deadline = time.monotonic() + 60
        while hub.producers()[0].alive:
            assert time.monotonic() < deadline
        os.kill(grandchild, signal.SIGKILL)
        child.wait()
        assert hub.reap() == 1
        hub.close(unlink=True)


@pytest.mark.parametrize("wrong", ["", "a.b", "a/b", "x" * 25, "-a", "a b"])
def test_run_ids_that_cannot_be_names_are_refused(wrong):
    with pytest.raises(TransportError, match="run id"):
        OperatorChannel.create(wrong, COLUMNS, SMALL)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_slots": 1}, "ring_slots"),
        ({"num_slots": 65}, "ring_slots"),
        ({"slot_bytes": 100}, "ring_slot"),
        ({"reply_slots": 1}, "reply_slots"),
    ],
)
def test_impossible_sizes_are_refused_by_name(settings, says):
    with pytest.raises(ConfigError, match=says):
        RingSettings(**settings)


def test_the_default_fits_a_container(run_id):
    with OperatorChannel.create(run_id, COLUMNS, RingSettings()) as channel:
        assert channel.segment.nbytes <= 48 * 10**6


def several_parts():
    """A channel's settings and rows that it must split."""
    return RingSettings(num_slots=4, slot_bytes=4096, reply_slot_bytes=4096), make_rows(8, 5, mean_tokens=100)


@pytest.mark.parametrize("wrong", [lambda row: row.astype(np.float64), lambda row: row[None], lambda row: row.tolist()])
@pytest.mark.parametrize("column", ["tokens", "feature"])
def test_a_bad_row_in_a_later_part_is_noticed_before_the_first_is_sent(run_id, wrong, column):
    settings, rows = several_parts()
    with pair(run_id, settings) as (channel, _):
        good = rows[column][7]
        rows[column][7] = wrong(good)
        with pytest.raises(ExperienceError, match=f"column '{column}'"):
            channel.send(rows, request_id=2, want_scores=True)
        assert channel.backlog() == channel.counters.records_sent == 0
        rows[column][7] = good
        assert channel.send(rows, request_id=2, want_scores=False).parts > 1


def test_parts_before_an_error_are_counted_and_nobody_waits_for_their_scores(run_id, monkeypatch):
    settings, rows = several_parts()
    with pair(run_id, settings) as (channel, _):

        def write(measured, start, stop, message, out, real=channel._codec.write):
            if start:
                raise ExperienceError("played")
            real(measured, start, stop, message, out)

        monkeypatch.setattr(channel._codec, "write", write)
        with pytest.raises(ExperienceError, match="played"):
            channel.send(rows, request_id=2, want_scores=True)
        assert channel.backlog() == channel.counters.records_sent == 1
        assert channel.counters.rows_sent + channel.counters.rows_dropped_newest == 8
        start = time.monotonic()
        assert channel.receive_scores(2, 90.0) is None
        assert time.monotonic() - start < 60


def test_a_claim_takes_the_oldest_record_even_if_it_was_committed_during_the_scan(run_id, monkeypatch):
    # Where the lock orders commits, they cannot happen during a scan at all.
    monkeypatch.setattr(locks, "TOTAL_STORE_ORDER", True)

    class Scanned:
        """The words, with two records committed after the first word of the first scan was read."""

        def __init__(self, words, commit):
            self.words, self.commit = words, commit

        def tolist(self):
            first, commit, self.commit = self.words[0], self.commit, None
            if commit is None:
                return self.words.tolist()
            commit()
            return [first, *self.words.tolist()[1:]]

        def __getitem__(self, slot):
            return self.words[slot]

        def __setitem__(self, slot, word):
            self.words[slot] = word

    with pair(run_id, backpressure="block") as (channel, hub):
        reader = hub._channels[channel.name].reader
        reader.ring.words = Scanned(reader.ring.words, lambda: [send(channel, 1), send(channel, 2)])
        assert [reader.claim()[1], reader.claim()[1]] == [1, 2]


def test_deliveries_may_be_released_by_several_threads(run_id):
    deliveries, errors = queue.SimpleQueue(), []

    def release():
        while (delivery := deliveries.get()) is not None:
            try:
                delivery.release()
            except (IndexError, TransportError) as error:  # noqa: PERF203  # one bad release is what is looked for
                errors.append(error)

    small = RingSettings(num_slots=64, slot_bytes=4096, reply_slot_bytes=4096)
    with pair(run_id, small, backpressure="drop_newest") as (channel, hub):
        threads = [threading.Thread(target=release) for _ in range(3)]
        for thread in threads:
            thread.start()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        rows, taken, deadline = make_rows(1, 1, mean_tokens=3), 0, time.monotonic() + 1.0
        while time.monotonic() < deadline and not errors:
            for _ in range(10):
                channel.send(rows, request_id=1, want_scores=False)
            while (delivery := hub.receive()) is not None:
                taken += 1
                deliveries.put(delivery)
        sys.setswitchinterval(interval)
        for _ in threads:
            deliveries.put(None)
        for thread in threads:
            thread.join(90.0)
        assert errors == []
        assert hub.producers()[0].taken.released == taken
        assert channel.backlog() == 0


def test_a_closed_channel_that_nobody_holds_gives_its_mapping_back_at_once(run_id):
    gc.collect()
    gc.disable()
    try:
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL)
        channel.close()
        del channel
        assert f"mpst.{run_id}" not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()

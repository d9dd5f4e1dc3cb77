"""A /dev/shm that is really too small or full: an error with the numbers, never a SIGBUS, nothing left behind."""

import os

import numpy as np
import pytest
from channel_peers import COLUMNS, SMALL, Child, assert_same, make_rows, take
from scenarios import drain, send
from small_shm import FILL, free_pages, in_small_shm, leave_free

from mps_trainer.errors import TransportError
from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub, leftovers, sweep_stale

RUN = "small"
#: What Docker gives a container by default.
DOCKER = f"size={64 * 2**20}"


def refused(run_id=RUN, settings=SMALL):
    """Create a channel that does not fit; what the error says."""
    before = sorted(os.listdir("/dev/shm"))
    with pytest.raises(TransportError) as caught:
        OperatorChannel.create(run_id, COLUMNS, settings)
    assert sorted(os.listdir("/dev/shm")) == before
    return str(caught.value)


def fill_every_slot(channel, hub, rows):
    """Send until every slot is taken, then read, twice: every page that a record can stand on is written and read."""
    for _ in range(2):
        for i in range(channel.segment.header.settings.num_slots):
            assert channel.send(rows, request_id=i, want_scores=True).rows_dropped == 0
        hub.find_new()
        for i in range(channel.segment.header.settings.num_slots):
            with take(hub) as delivery:
                assert_same(delivery.batch, rows)
                assert delivery.reply(np.full(delivery.header.num_rows, i, np.float32), 1)
            assert channel.receive_scores(i, 1.0).values[0] == i


def large_rows(settings):
    """One batch that takes nearly a whole slot."""
    rows = make_rows(300, 1, mean_tokens=1500)
    size = sum(len(t) for t in rows["tokens"]) * 5
    count = int(0.9 * settings.slot_bytes / size * 300)
    return make_rows(count, 1, mean_tokens=1500)


def test_the_default_ring_fits_the_64_mb_of_a_container():
    def body():
        settings = RingSettings()
        with SidecarHub(RUN, COLUMNS) as hub:
            with OperatorChannel.create(RUN, COLUMNS, settings, backpressure="drop_newest") as channel:
                rows = large_rows(settings)
                result = channel.send(rows, request_id=0, want_scores=False)
                assert result.parts == 1
                assert result.nbytes > 0.8 * settings.slot_bytes
                take(hub).release()
                fill_every_slot(channel, hub, rows)
                text = refused("second", settings)
                for word in ("MiB free", "needs 45.0 MiB", "--shm-size", "ring_slot"):
                    assert word in text
                fill_every_slot(channel, hub, rows)
            hub.reap()
            hub.close(unlink=True)
        assert os.listdir("/dev/shm") == []

    in_small_shm(DOCKER, body)


def test_each_page_too_few_is_an_error_and_enough_of_them_are_enough():
    def body():
        pages, texts = 0, []
        channel = None
        while channel is None:
            leave_free(pages)
            try:
                channel = OperatorChannel.create(RUN, COLUMNS, SMALL)
            except TransportError as error:
                texts.append(str(error))
            else:
                break
            assert os.listdir("/dev/shm") == ["fill"]
            assert free_pages() == pages
            pages += 1
        assert free_pages() == 0, "it took all that it was given"
        assert pages * 4096 >= channel.segment.nbytes
        assert all("MiB" in text and "--shm-size" in text for text in texts)
        # On a tmpfs without a free page: attach, every slot, replies, and the end.
        with SidecarHub(RUN, COLUMNS) as hub:
            fill_every_slot(channel, hub, make_rows(40, 1))
            channel.close()
            hub.reap()
            hub.close(unlink=True)
        assert os.listdir("/dev/shm") == ["fill"]
        assert len(texts) == pages

    in_small_shm("size=1m", body)


def test_each_file_too_few_is_an_error_that_counts_them():
    for files in range(1, 7):

        def body(files=files):
            if files < 6:
                assert "files free" in refused()
                assert os.listdir("/dev/shm") == []
                return
            # The root folder, the segment, three semaphores, and the link by which glibc names a semaphore.
            OperatorChannel.create(RUN, COLUMNS, SMALL).close()

        in_small_shm(f"size=1m,nr_inodes={files}", body)


def test_a_second_operator_that_does_not_fit_harms_nobody():
    def body():
        with SidecarHub(RUN, COLUMNS) as hub, OperatorChannel.create(RUN, COLUMNS, SMALL) as channel:
            leave_free(3)
            send(channel, 1)
            assert "MiB free" in refused()
            assert "MiB free" in refused("another-run")
            send(channel, 2)
            hub.find_new()
            assert drain(hub) == [1, 2]
            assert len(hub.producers()) == 1

    in_small_shm("size=1m", body)


def test_a_larger_ring_for_the_next_start_does_not_fit():
    """ring_slots was raised between two runs, while the first one's channel still waits for its sidecar."""

    def body():
        with OperatorChannel.create(RUN, COLUMNS, SMALL) as channel:
            send(channel, 1)
        grown = RingSettings(num_slots=64, slot_bytes=SMALL.slot_bytes, reply_slot_bytes=4096)
        before = leftovers(RUN)
        text = refused("next", grown)
        assert "ring_slots=64 x ring_slot=16384" in text
        assert leftovers(RUN) == before

    in_small_shm("size=1m", body)


def test_what_a_killed_operator_left_makes_room_for_its_successor():
    def body():
        def operator(report):
            send(OperatorChannel.create(RUN, COLUMNS, SMALL), 1)

        assert Child(operator).wait() == 0
        leave_free(5)
        # Another run may not touch it: it waits for its sidecar.
        assert "MiB free" in refused("another-run")
        with OperatorChannel.create(RUN, COLUMNS, SMALL) as channel:
            send(channel, 2)
        # A closed channel's mapping ends with the object; until then its pages are in use.
        del channel
        assert Child(operator).wait() == 0
        assert "MiB free" in refused("another-run")
        sweep_stale(lambda run: False)
        OperatorChannel.create("another-run", COLUMNS, SMALL).close()
        assert os.listdir("/dev/shm") == ["fill"]

    in_small_shm("size=256k", body)


def test_a_doorbell_that_cannot_be_made_anew_is_made_later():
    def body():
        with OperatorChannel.create(RUN, COLUMNS, SMALL) as channel, SidecarHub(RUN, COLUMNS) as hub:
            os.unlink(f"/dev/shm/sem.mpst.{RUN}.bell")
            leave_free(0)
            hub.find_new()
            assert hub.shortages.count == 1
            send(channel, 1)
            assert drain(hub) == [1]
            os.unlink(FILL)
            hub.find_new()
            send(channel, 2)
            assert drain(hub) == [2]
            hub.close(unlink=False)

    in_small_shm("size=1m", body)

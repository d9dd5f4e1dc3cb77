"""What a reader keeps after a release: an error, never another record."""

import gc
import mmap
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from channel_peers import COLUMNS, make_rows, pair, take

from mps_trainer.errors import TransportError
from mps_trainer.transport import SidecarHub, attached
from mps_trainer.transport.private import make_private


def fill(channel, request_id, value):
    rows = make_rows(3, request_id)
    rows["reward"] = np.full(3, value, np.float32)
    channel.send(rows, request_id=request_id, want_scores=False)


def reuse_all_slots(channel, hub):
    for i in range(100, 100 + 4 * channel.segment.header.settings.num_slots):
        fill(channel, i, -1.0)
        if hub.wait(0.0):
            take(hub).release()


def kept_array(delivery):
    return delivery.batch["reward"].values


def kept_slice(delivery):
    return delivery.batch["tokens"].row(1)[1:]


def kept_batch(delivery):
    return delivery.batch


def kept_payload(delivery):
    return delivery.payload[8:]


def kept_frombuffer(delivery):
    return np.frombuffer(delivery.payload, np.uint8)


def kept_torch(delivery):
    torch = pytest.importorskip("torch")
    return torch.frombuffer(bytearray(delivery.payload), dtype=torch.uint8), torch.from_numpy(
        np.asarray(delivery.batch["reward"].values)
    )


def kept_memoryview(delivery):
    return delivery.payload


def kept_torch_frombuffer(delivery):
    torch = pytest.importorskip("torch")
    return torch.frombuffer(delivery.payload, dtype=torch.uint8)


KEEPERS = [
    kept_array,
    kept_slice,
    kept_batch,
    kept_payload,
    kept_frombuffer,
    kept_torch,
    kept_memoryview,
    kept_torch_frombuffer,
]
ignore_read_only = pytest.mark.filterwarnings("ignore:The given (NumPy array|buffer) is not writable")


@pytest.mark.parametrize("keep", KEEPERS)
@ignore_read_only
def test_a_kept_view_is_an_error_and_goes_on_showing_its_own_record(run_id, keep):
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        delivery = take(hub)
        before = bytes(delivery.payload)
        at = channel.segment.header.header_bytes + 128
        kept = keep(delivery)
        with pytest.raises(TransportError, match=r"outlive its delivery(.|\n)*copy"):
            delivery.release()
        reuse_all_slots(channel, hub)
        assert bytes(channel.segment.memory[at : at + len(before)]) == before
        assert hub.producers()[0].taken.lingering == 1
        del kept
        reuse_all_slots(channel, hub)
        assert hub.producers()[0].taken.lingering == 0
        assert bytes(channel.segment.memory[at : at + len(before)]) != before


def test_leaving_the_with_block_checks_too(run_id):
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        with pytest.raises(TransportError, match="outlive"), take(hub) as delivery:
            kept = delivery.batch["reward"].values
        assert kept[0] == 7.0


def test_copies_may_be_kept(run_id):
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        with take(hub) as delivery:
            kept = delivery.batch["reward"].values.copy()
            raw = bytes(delivery.payload)
        reuse_all_slots(channel, hub)
        assert kept.tolist() == [7.0] * 3
        assert np.frombuffer(raw, np.uint8)[0] == 0xFF


def test_the_delivery_itself_says_so_after_release(run_id):
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        delivery = take(hub)
        delivery.release()
        delivery.release()
        for use in (lambda: delivery.batch, lambda: delivery.payload):
            with pytest.raises(TransportError, match="was released"):
                use()


def test_an_error_in_the_block_is_not_replaced(run_id):
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        with pytest.raises(ZeroDivisionError), take(hub) as delivery:  # noqa: PT012  # the block is what is tested
            kept = delivery.batch["reward"].values
            1 / 0  # noqa: B018
        assert kept[0] == 7.0
        del kept
        gc.collect()
        reuse_all_slots(channel, hub)
        assert hub.producers()[0].taken.lingering == 0


def test_views_in_a_reference_cycle_are_collected_and_not_blamed(run_id):
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        with take(hub) as delivery:
            cycle = [delivery.batch["reward"].values]
            cycle.append(cycle)
            del cycle


def test_views_that_hold_every_slot_are_an_error_and_not_a_hang(run_id):
    with pair(run_id) as (channel, hub):
        kept = []
        for i in range(4):
            fill(channel, i, float(i))
            delivery = take(hub)
            kept.append(delivery.batch["reward"].values)
            with pytest.raises(TransportError):
                delivery.release()
        with pytest.raises(TransportError, match="hold all 4 slots"):
            hub.receive()
        assert [array[0] for array in kept] == [0.0, 1.0, 2.0, 3.0]


def test_views_outlive_the_hub_without_a_crash(run_id):
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        kept = take(hub).batch["reward"].values
        hub.close(unlink=False)
        SidecarHub(run_id, COLUMNS).close(unlink=False)
    gc.collect()
    assert kept.tolist() == [7.0] * 3


def test_a_delivery_that_is_open_when_its_hub_closes_says_so_afterwards(run_id):
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        delivery = take(hub)
        hub.close(unlink=False)
        with SidecarHub(run_id, COLUMNS) as successor:
            take(successor).release()
            reuse_all_slots(channel, successor)
            for use in (lambda: delivery.batch, lambda: delivery.payload):
                with pytest.raises(TransportError, match="closed hub"):
                    use()


def shown(kept):
    """What a kept view shows now, as bytes."""
    if isinstance(kept, tuple):
        return b"".join(shown(part) for part in kept)
    if hasattr(kept, "num_rows"):
        return kept["tokens"].values.tobytes() + kept["reward"].values.tobytes()
    return bytes(kept.numpy()) if hasattr(kept, "numpy") else bytes(memoryview(kept))


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("keep", KEEPERS)
@ignore_read_only
def test_views_kept_past_the_close_of_the_hub_go_on_showing_their_record(run_id, keep, released):
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        delivery = take(hub)
        kept = keep(delivery)
        before = shown(kept)
        if released:
            with pytest.raises(TransportError, match="outlive"):
                delivery.release()
        hub.close(unlink=False)
        with SidecarHub(run_id, COLUMNS) as successor:
            # It gets the record again, gives its slot back, and the operator uses it for others.
            with take(successor) as again:
                assert again.header.request_id == 1
            reuse_all_slots(channel, successor)
            assert channel.backlog() == 0
        assert shown(kept) == before
        del delivery
        gc.collect()
        assert shown(kept) == before


def test_records_that_were_not_lent_are_not_copied_at_the_close(run_id, monkeypatch):
    copied = []
    monkeypatch.setattr(attached, "make_private", lambda *where: copied.append(where))
    with pair(run_id) as (channel, hub):
        for i in (1, 2, 3):
            fill(channel, i, 7.0)
        take(hub).release()
        delivery = take(hub)
        ring = channel.segment
        hub.close(unlink=False)
        assert [nbytes for _, nbytes in copied] == [ring.header.settings.slot_bytes]
        del delivery


def test_a_segment_stays_mapped_under_a_tensor_that_took_no_export(run_id):
    torch = pytest.importorskip("torch")
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        tensor = torch.frombuffer(hub.segments()[0].memory, dtype=torch.uint8)
        hub.close(unlink=False)
        gc.collect()
        assert bytes(tensor[:8].numpy()) == b"MPSTCHAN"
        assert len(mappings(run_id)) == 2
        del tensor
        gc.collect()
        assert len(mappings(run_id)) == 1


def mappings(run_id):
    """Lines of this process's memory map that are segments of the run."""
    return [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if f"/mpst.{run_id}." in line and "sem." not in line
    ]


def test_threads_that_read_while_the_hub_closes_see_their_record(run_id):
    with pair(run_id) as (channel, hub):
        fill(channel, 1, 7.0)
        kept = take(hub).batch["reward"].values
        wrong, stop = [], threading.Event()

        def read():
            while not stop.is_set():
                if kept.tolist() != [7.0] * 3:
                    wrong.append(kept.tolist())

        thread = threading.Thread(target=read)
        thread.start()
        hub.close(unlink=False)
        with SidecarHub(run_id, COLUMNS) as successor:
            take(successor).release()
            reuse_all_slots(channel, successor)
        stop.set()
        thread.join()
        assert wrong == []


def test_private_pages_are_not_seen_by_others_and_need_not_begin_at_a_page():
    page = mmap.PAGESIZE
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * page)
        first, second = (mmap.mmap(file.fileno(), 4 * page) for _ in range(2))
        array = np.frombuffer(first, np.uint8)
        make_private(array.ctypes.data + page + 8, page)
        second[:] = b"x" * (4 * page)
        assert array.reshape(4, page).max(axis=1).tolist() == [120, 0, 0, 120]

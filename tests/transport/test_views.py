"""What a reader keeps after a release: an error, never another record."""

import gc

import numpy as np
import pytest
from channel_peers import COLUMNS, make_rows, pair, take

from mps_trainer.errors import TransportError
from mps_trainer.transport import SidecarHub


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


@pytest.mark.parametrize("keep", [kept_array, kept_slice, kept_batch, kept_payload, kept_frombuffer, kept_torch])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
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
        payload = delivery.payload
        delivery.release()
        delivery.release()
        for use in (lambda: delivery.batch, lambda: delivery.payload):
            with pytest.raises(TransportError, match="was released"):
                use()
        with pytest.raises(ValueError, match="released memoryview"):
            payload[0]


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

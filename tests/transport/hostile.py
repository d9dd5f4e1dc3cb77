"""Segments with bytes that nobody should believe. Used by test_hostile.py and scripts/fuzz_transport.py.

`attack` mutates a segment that holds records and replies and then plays both readers over it. It returns what happened;
anything but an error of ours or a well-formed record is raised as it is. A crash, a hang or an over-read ends the
process, which the caller notices.
"""

import logging

import numpy as np
from channel_peers import COLUMNS

from mps_trainer.columns import PackedBatch
from mps_trainer.errors import CorruptRecordError, TransportError
from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub, layout

SETTINGS = RingSettings(num_slots=2, slot_bytes=8192, reply_slots=2, reply_slot_bytes=4096)
logging.getLogger("mps_trainer.transport").setLevel(logging.ERROR)


def assert_well_formed(batch: PackedBatch) -> None:
    """Every row can be read, and no offset points outside."""
    for column in COLUMNS:
        packed = batch[column.name]
        if packed.offsets is not None:
            assert packed.offsets[0] == 0
            assert packed.offsets[-1] == len(packed.values)
            assert (packed.offsets[1:] >= packed.offsets[:-1]).all()
            assert np.diff(packed.offsets).max(initial=0) <= column.maximum
        else:
            assert len(packed.values) == batch.num_rows
        for i in range(batch.num_rows):
            packed.row(i).tobytes()


def read_all(hub: SidecarHub, limit: int = 8) -> list[str]:
    """Read until nothing is ready; at most `limit` records, since nothing may be delivered for ever."""
    seen = []
    for _ in range(limit):
        try:
            if not hub.wait(0.0):
                return seen
            delivery = hub.receive()
            if delivery is None:
                continue
            assert_well_formed(delivery.batch)
            delivery.reply(np.zeros(delivery.header.num_rows, np.float32), 1)
            delivery.release()
            seen.append("record")
        except CorruptRecordError:
            seen.append("corrupt")
    raise AssertionError(f"the hub delivers for ever: {seen}")


def attack(run_id: str, rows: dict, mutate, *, attached: bool) -> list[str]:
    """Send two records, mutate the segment by `mutate(memoryview)`, read. `attached`: mutate after the hub attached."""
    channel = OperatorChannel.create(run_id, COLUMNS, SETTINGS)
    sane = bytes(channel.segment.memory[:4096])
    hub = None
    try:
        for i in (1, 2):
            channel.send(rows, request_id=i, want_scores=True)
        if attached:
            hub = SidecarHub(run_id, COLUMNS)
        mutate(channel.segment.memory)
        if hub is None:
            hub = SidecarHub(run_id, COLUMNS)
        outcome = [f"refused: {reason}" for reason in hub.refused.values()] + read_all(hub)
        for i in (1, 2):
            scores = channel.receive_scores(i, 0.0)
            assert scores is None or scores.values.shape == (len(rows["eid"]),)
        try:
            channel.send(rows, request_id=3, want_scores=False)
        except TransportError:
            outcome.append("send refused")
        return outcome
    finally:
        # What nobody believes nobody removes at once: make it a channel again.
        for start, end in ((0, layout.STATIC_BYTES), (layout.SCHEMA, 4096)):
            channel.segment.memory[start:end] = sane[start:end]
        channel.close()
        if hub is not None:
            hub.close(unlink=True)

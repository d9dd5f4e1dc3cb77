"""This project's ring for bench_transport.py: as an operator and a sidecar use it, and without its codec."""

import threading

import numpy as np

from mps_trainer.columns import Column
from mps_trainer.transport import OperatorChannel, RingSettings, Segment, SidecarHub, layout, names, schema
from mps_trainer.transport.layout import LOCK_SIDECAR_LIFE, RECORD_HEADER_BYTES
from mps_trainer.transport.record import KIND_BATCH, pack_whole, unpack_record
from mps_trainer.transport.ring import Released, RingReader, RingWriter, feed_ring
from mps_trainer.transport.segment import new_header
from mps_trainer.transport.semaphores import Doorbell, WakeUp
from mps_trainer.transport.small import MAX_BYTES
from mps_trainer.transport.standing import Standing

#: One row a message, and one column that holds its bytes.
COLUMNS = (Column(name="message", source="message", dtype="uint8", shape=(None,), maximum=2**26),)
ONE_SCORE = np.zeros(1, np.float32)


class RingOut:
    """The product: `OperatorChannel.send`, codec and all."""

    def __init__(self, address, nbytes, depth):
        slots = RingSettings(num_slots=depth, slot_bytes=nbytes + 4096, reply_slot_bytes=4096)
        self.channel = OperatorChannel.create(address, COLUMNS, slots, backpressure="block", block_timeout_s=60.0)

        self.asked = 0

    def send(self, array):
        if self.channel.send({"message": [array]}, request_id=1, want_scores=False).rows_dropped:
            raise RuntimeError("the ring dropped a message")

    def ask(self, array):
        """Send and wait for the scores, as an operator in modes filter and reward does."""
        self.asked += 1
        self.channel.send({"message": [array]}, request_id=self.asked, want_scores=True)
        if self.channel.receive_scores(self.asked, 60.0) is None:
            raise RuntimeError("the ring brought no scores")

    def close(self):
        self.channel.close()


class RingIn:
    """The product: `SidecarHub.wait`, `receive`, `Delivery.release`."""

    def __init__(self, address):
        self.hub = SidecarHub(address, COLUMNS)

    def receive(self):
        while (delivery := self.hub.receive()) is None:
            self.hub.wait(1.0)
        self.delivery = delivery
        return delivery.batch["message"].values

    def answer(self):
        self.delivery.reply(ONE_SCORE, 1)

    def done(self):
        self.delivery.release()

    def close(self):
        self.hub.close(unlink=True)


class BareOut:
    """The transport without its codec, for raw bytes as the other links carry them.

    Its parts are the product's, in the product's order: thread lock, look at the standing of the channel (closed,
    refused, removed), slot, payload, record header with its CRC, commit, doorbell of the sidecar that is attached.
    Left out are: encoding and checking of rows, back-pressure (it waits), counters.
    """

    def __init__(self, address, nbytes, depth):
        slots = RingSettings(num_slots=depth, slot_bytes=max(4096, nbytes + RECORD_HEADER_BYTES), reply_slot_bytes=4096)
        self.segment = Segment.create(new_header(address, slots, "block", b"[]", schema.digest(b"[]")))
        self.writer = RingWriter(feed_ring(self.segment))
        self.space = WakeUp(names.space_name(address, self.segment.header.index), create=True)
        self.bell = Doorbell(address)
        self.status = self.segment.words(layout.SIDECAR_WORDS, 4)
        self.standing = Standing(self.segment, self.status)
        self.sending = threading.Lock()
        self.mapped = np.frombuffer(self.segment.memory, np.uint8)
        self.generation = self.segment.header.generation
        self.segment.publish()

    def send(self, array):
        with self.sending:
            self.standing.check()
            slot = self.writer.known_free
            while slot is None:
                self.space.wait(1.0)
                slot = self.writer.reserve()
            nbytes, seq, at = array.nbytes, self.writer.next_seq, self.writer.ring.offset(slot)
            if nbytes <= MAX_BYTES:
                self.segment.memory[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + nbytes] = array.data
            else:
                np.copyto(self.mapped[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + nbytes], array)
            self.segment.memory[at : at + RECORD_HEADER_BYTES] = pack_whole(self.generation, seq, nbytes, seq, 1, 0)
            self.writer.commit(slot, seq)
            if self.status[1] != self.bell.inode:
                raise RuntimeError("the reader sleeps on another doorbell")
            self.bell.post()
            self.space.consume()

    def close(self):
        self.segment.remove()
        self.segment.close()
        self.space.close()
        self.bell.close(unlink_if_alone=True)


class BareIn:
    """The reader's end of `BareOut`: claim, checks of the record header, view, release under the thread lock.

    Left out are: decoding, the lease that notices views kept past the release, the look for new operators, counters.
    """

    def __init__(self, address):
        self.segment = Segment.attach(names.segment_name(address, 0), LOCK_SIDECAR_LIFE)
        self.reader = RingReader(feed_ring(self.segment))
        self.space = WakeUp(names.space_name(address, 0), create=False)
        self.bell = Doorbell(address)
        status = self.segment.words(layout.SIDECAR_WORDS, 4)
        status[1], status[0] = self.bell.inode, layout.STATUS_ATTACHED
        self.freeing = threading.Lock()
        self.mapped = np.frombuffer(self.segment.readonly, np.uint8)
        self.generation = self.segment.header.generation

    def receive(self):
        while (claimed := self.reader.claim()) is None:
            self.bell.wait(1.0)
        self.bell.consume()
        self.slot, seq = claimed
        ring = self.reader.ring
        at = ring.offset(self.slot)
        raw = self.segment.readonly[at : at + RECORD_HEADER_BYTES].tobytes()
        header = unpack_record(raw, generation=self.generation, seq=seq, capacity=ring.capacity, kind=KIND_BATCH)
        return self.mapped[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + header.payload_bytes]

    def done(self):
        with self.freeing:
            if self.reader.release(self.slot) is Released.WAKE:
                self.space.post()

    def close(self):
        self.segment.remove()
        self.segment.close()
        self.space.close()
        self.bell.close(unlink_if_alone=True)

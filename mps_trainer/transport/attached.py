"""The sidecar's side of one channel: claims, checks and lends records, sends replies, notices the operator's death."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections import deque

import numpy as np
import numpy.typing as npt

from mps_trainer.errors import CorruptRecordError, TransportError
from mps_trainer.transport import layout, names
from mps_trainer.transport.arrow import Bytes
from mps_trainer.transport.codec import Codec
from mps_trainer.transport.counters import HubCounters, Mirror
from mps_trainer.transport.delivery import Delivery
from mps_trainer.transport.layout import LOCK_OPERATOR_LIFE, LOCK_SIDECAR_LIFE, RECORD_HEADER_BYTES
from mps_trainer.transport.private import make_private
from mps_trainer.transport.record import KIND_BATCH, SENT_NS_OFFSET, RecordHeader, unpack_record
from mps_trainer.transport.replies import ReplyOutbox
from mps_trainer.transport.ring import FREE, READING, Released, RingReader, feed_ring
from mps_trainer.transport.segment import Segment
from mps_trainer.transport.semaphores import WakeUp

log = logging.getLogger(__name__)

#: A channel whose operator is stopped inside the mutex costs the mutex's time limit at each try: not tried for so long.
STUCK_S = 0.25


class StoppedOperatorError(TransportError):
    """The operator is stopped inside the ring's mutex; trying again later may succeed."""


class AttachedChannel:
    """One operator's channel, with this process as its sidecar."""

    def __init__(self, name: str, codec: Codec, bell_inode: int, pid: int) -> None:
        """Attach.

        Raises what `Segment.attach` raises, TransportError when the semaphores are gone, StoppedOperatorError.
        """
        self.segment = Segment.attach(name, LOCK_SIDECAR_LIFE)
        with contextlib.ExitStack() as undo:
            undo.callback(self.segment.close)
            self._start(codec, bell_inode, pid, undo)
            undo.pop_all()

    def _start(self, codec: Codec, bell_inode: int, pid: int, undo: contextlib.ExitStack) -> None:
        header = self.segment.header
        self.name = self.segment.name
        self.counters = HubCounters()
        self._codec = codec
        self._space = WakeUp(names.space_name(header.run_id, header.index), create=False)
        undo.callback(self._space.close)
        self._reply_wake = WakeUp(names.reply_name(header.run_id, header.index), create=False)
        undo.callback(self._reply_wake.close)
        self.reader = RingReader(feed_ring(self.segment))
        recovered = self.reader.recover()
        if recovered < 0:
            raise StoppedOperatorError(
                f"the operator of {self.name} (pid {header.pid}) is stopped inside the ring", "resume it"
            )
        self.counters.recovered = recovered
        self._outbox = ReplyOutbox(self.segment, self._reply_wake, self.counters)
        self._generation = header.generation
        self._mapped: Bytes = np.frombuffer(self.segment.readonly, np.uint8)
        self._mirror = Mirror(self.segment, layout.SIDECAR_COUNTERS, self.counters)
        self._retired: deque[int] = deque()
        self._to_free: deque[int] = deque()
        self._freeing = threading.Lock()
        self.stuck_until = 0.0
        self.closed = False
        self._status = self.segment.words(layout.SIDECAR_WORDS, 4)
        self._status[2] = pid
        self.set_bell(bell_inode)
        self._status[0] = layout.STATUS_ATTACHED

    def set_bell(self, inode: int) -> None:
        """Tell the operator which doorbell this sidecar sleeps on."""
        self._status[1] = inode

    def refuse(self, reason: str) -> None:
        """Detach for good and leave the reason where the operator's next `send` finds it."""
        raw = reason.encode("utf-8", "replace")[: layout.REFUSAL_BYTES].ljust(layout.REFUSAL_BYTES, b"\0")
        self.segment.memory[layout.REFUSAL : layout.REFUSAL + layout.REFUSAL_BYTES] = raw
        self.close(remove=False, status=layout.STATUS_REFUSED)

    @property
    def operator_alive(self) -> bool:
        """Whether the operator's process lives."""
        return self.segment.alive(LOCK_OPERATOR_LIFE)

    @property
    def backlog(self) -> int:
        """Slots that are not free: ready, being read, or held by views."""
        return self.reader.ring.num_slots - self.reader.ring.count(FREE)

    def has_ready(self) -> bool:
        """Whether a record is ready, as a hint."""
        return self.reader.ready() and not self._is_stuck()

    def ready_since(self) -> int | None:
        """When the oldest ready record was sent (CLOCK_MONOTONIC, ns), as a hint; None when there is none."""
        found = None if self._is_stuck() else self.reader.peek()
        if found is None:
            return None
        at = self.reader.ring.offset(found[0]) + SENT_NS_OFFSET
        return int.from_bytes(self.segment.memory[at : at + 8], "little", signed=True)

    def receive(self) -> Delivery | None:
        """Claim and check the oldest ready record. None when there is none, or the operator is stopped in the mutex.

        Raises CorruptRecordError, with the slot freed, when it does not add up.
        """
        timeouts = self.reader.ring.mutex.timeouts
        claimed = self.reader.claim()
        if claimed is None:
            if self.reader.ring.mutex.timeouts > timeouts:
                self.stuck_until = time.monotonic() + STUCK_S
            return None
        slot, seq = claimed
        self.counters.received += 1
        try:
            return self._lend(slot, seq)
        except CorruptRecordError:
            self.counters.corrupt += 1
            self.free(slot)
            raise

    def free(self, slot: int) -> None:
        """See `Lessor.free`."""
        with self._freeing:
            self.counters.released += 1
            self._free(slot)
            self._mirror.store()

    def linger(self, slot: int) -> None:
        """See `Lessor.linger`."""
        with self._freeing:
            self.counters.lingering += 1
            if not self.closed:
                # After that the words are a successor's.
                self._mirror.store()

    def retire(self, slot: int) -> None:
        """See `Lessor.retire`."""
        self._retired.append(slot)

    def reply(
        self,
        header: RecordHeader,
        values: npt.NDArray[np.float32],
        model_version: int,
        sidecar_ns: int,
        trained_ns: int,
    ) -> bool:
        """See `Lessor.reply`."""
        return self.operator_alive and self._outbox.send(header, values, model_version, sidecar_ns, trained_ns)

    def tidy(self) -> None:
        """Give back slots whose last view has died, and those that a stopped operator kept us from giving back."""
        while self._retired:
            with self._freeing:
                self.counters.lingering -= 1
            self.free(self._retired.popleft())
        if self._to_free and not self._is_stuck():
            with self._freeing:
                self._free_pending()

    def close(self, *, remove: bool, status: int = layout.STATUS_DETACHED) -> bool:
        """Detach, and remove the segment if asked to and nobody else uses it; True when it is gone."""
        self.closed = True
        self._status[0] = status
        self._keep_what_is_lent()
        gone = remove and self.segment.remove()
        self.segment.close()
        self._space.close()
        self._reply_wake.close()
        return gone

    def _keep_what_is_lent(self) -> None:
        # While we still hold the life lock: a successor would lend these slots anew, and the operator then reuse them.
        ring = self.reader.ring
        back = {*self._to_free, *self._retired}
        for slot, word in enumerate(ring.words.tolist()):
            if word & 3 == READING and slot not in back:
                try:
                    make_private(self.segment.address + ring.offset(slot), ring.capacity + RECORD_HEADER_BYTES)
                except OSError as error:
                    log.warning("views of a record of %s may change from now on: %s", self.name, error)

    def _is_stuck(self) -> bool:
        # The truth of 0.0 first: this is on the way of every look, and a channel is hardly ever stuck.
        return bool(self.stuck_until) and time.monotonic() < self.stuck_until

    def _free(self, slot: int) -> bool:
        """Give a slot back, or keep it in mind when the operator is stopped in the mutex: then False."""
        released = self.reader.release(slot)
        if released is Released.STUCK:
            self._to_free.append(slot)
            self.stuck_until = time.monotonic() + STUCK_S
            return False
        if released is Released.WAKE:
            self._space.post()
        return True

    def _free_pending(self) -> None:
        for _ in range(len(self._to_free)):
            if not self._free(self._to_free.popleft()):
                return

    def _lend(self, slot: int, seq: int) -> Delivery:
        ring = self.reader.ring
        at = ring.offset(slot)
        header = unpack_record(
            self._mapped[at : at + RECORD_HEADER_BYTES].tobytes(),
            generation=self._generation,
            seq=seq,
            capacity=ring.capacity,
            kind=KIND_BATCH,
            channel=self.name,
        )
        # An array of its own, whose end of life is the end of all views: see `delivery`.
        base = np.frombuffer(self.segment.readonly, np.uint8, header.payload_bytes, at + RECORD_HEADER_BYTES)
        if header.payload_crc is not None and zlib.crc32(base.data) != header.payload_crc:
            raise CorruptRecordError(f"the payload of record {seq} of {self.name} does not match its checksum")
        batch = self._codec.decode(base)
        if batch.num_rows != header.num_rows:
            raise CorruptRecordError(
                f"record {seq} of {self.name} has {batch.num_rows} rows and says {header.num_rows}"
            )
        return Delivery(self, slot, header, base, batch)

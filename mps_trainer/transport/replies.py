"""Scores on their way back: the sidecar's outbox and the operator's inbox, over one reply ring.

A reply is a record batch with the one column `score`. It repeats request, part and first row of the batch record
that it answers, so replies may come in any order, twice (a record was delivered again) or not at all.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mps_trainer.columns import Column
from mps_trainer.errors import CorruptRecordError
from mps_trainer.transport import names
from mps_trainer.transport.arrow import Bytes
from mps_trainer.transport.codec import Codec, encode_batch
from mps_trainer.transport.counters import ChannelCounters, HubCounters
from mps_trainer.transport.layout import RECORD_HEADER_BYTES, RingSettings
from mps_trainer.transport.record import KIND_SCORES, RecordHeader, unpack_record
from mps_trainer.transport.ring import RingReader, RingWriter, reply_ring
from mps_trainer.transport.segment import Segment
from mps_trainer.transport.semaphores import WakeUp
from mps_trainer.transport.small import SmallEncoder

REPLY_COLUMNS = (Column(name="score", source="score", dtype="float32"),)
_CODEC = Codec(REPLY_COLUMNS)
_SMALL = SmallEncoder(_CODEC.layout)
#: Requests that the inbox keeps in mind; beyond, the oldest is given up.
_MAX_PENDING = 1024
#: How soon a waiter notices that the sidecar died.
_LOOK_S = 0.25


def _encode(values: npt.NDArray[np.float32]) -> bytes:
    """One reply's payload."""
    small = _SMALL.encode({"score": values})
    if small is not None and isinstance(small[2], bytes):
        return small[2]
    return encode_batch({"score": values}, REPLY_COLUMNS)


def max_reply_rows(settings: RingSettings) -> int:
    """How many scores fit one reply slot."""
    return (settings.reply_slot_bytes - RECORD_HEADER_BYTES - _CODEC.layout.slack_bytes) // 4


class Scores(NamedTuple):
    """The answer to one request.

    Attributes:
        request_id: the request.
        values: float32 (n,), in the order in which the rows were sent. Owned by the receiver.
        model_version: of the oldest model that scored a part.
        sidecar_ns: nanoseconds that the sidecar had the batch, from claiming it to replying, summed over parts.
        trained_ns: CLOCK_MONOTONIC when the oldest model that scored a part last took a training step; 0: not known.
    """

    request_id: int
    values: npt.NDArray[np.float32]
    model_version: int
    sidecar_ns: int
    trained_ns: int = 0


def _nobody() -> bool:
    return False


@dataclass
class _Pending:
    parts: int
    num_rows: int
    abandoned: bool = False
    arrived: dict[int, tuple[RecordHeader, npt.NDArray[np.float32]]] = field(default_factory=dict)

    def scores(self, request_id: int) -> Scores | None:
        """The assembled answer, None while a part is missing."""
        if len(self.arrived) < self.parts:
            return None
        if self.parts == 1:
            ((header, values),) = self.arrived.values()
            if header.num_rows == self.num_rows:
                return Scores(request_id, values, header.model_version, header.sidecar_ns, header.trained_ns)
        values = np.full(self.num_rows, np.nan, np.float32)
        for header, part in self.arrived.values():
            values[header.first_row : header.first_row + len(part)] = part
        headers = [header for header, _ in self.arrived.values()]
        return Scores(
            request_id,
            values,
            min(h.model_version for h in headers),
            sum(h.sidecar_ns for h in headers),
            min(h.trained_ns for h in headers),
        )


class ReplyInbox:
    """The operator's end: one thread at a time sleeps on the semaphore and sorts what comes for all of them."""

    def __init__(self, segment: Segment, counters: ChannelCounters, sidecar_alive: Callable[[], bool]) -> None:
        header = segment.header
        self._segment = segment
        self._counters = counters
        self._sidecar_alive = sidecar_alive
        self._wake = WakeUp(names.reply_name(header.run_id, header.index), create=True)
        self._reader = RingReader(reply_ring(segment))
        self._mapped: Bytes = np.frombuffer(segment.readonly, np.uint8)
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._changed = threading.Condition()
        self._sleeper = False
        self._waiting = 0
        self._closed = False

    def expect(self, request_id: int, parts: int, num_rows: int, *, collect: bool = False) -> None:
        """Note that a request goes out; its replies are kept from now on. With `collect` as `collect` does, too."""
        with self._changed:
            self._pending[request_id] = _Pending(parts, num_rows)
            while len(self._pending) > _MAX_PENDING:
                self._pending.popitem(last=False)
            if collect:
                self._sort_arrivals()

    def collect(self) -> None:
        """Fetch what has arrived without waiting, so that the reply ring has room for more."""
        with self._changed:
            self._sort_arrivals()

    def abandon(self, request_id: int) -> None:
        """A part of the request will never be answered: stop waiting for it."""
        with self._changed:
            pending = self._pending.get(request_id)
            if pending is not None:
                pending.abandoned = True
                self._changed.notify_all()

    def receive(self, request_id: int, timeout_s: float) -> Scores | None:
        """See `OperatorChannel.receive_scores`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                self._sort_arrivals()
                pending = self._pending.get(request_id)
                if pending is None:
                    return None
                scores = pending.scores(request_id)
                remaining_s = deadline - time.monotonic()
                if scores is not None or pending.abandoned or remaining_s <= 0 or not self._sidecar_alive():
                    del self._pending[request_id]
                    return scores
                self._sleep(min(remaining_s, _LOOK_S))
        return None

    def close(self) -> None:
        """Wake all waiters with None and unmap the semaphore once nobody sleeps on it. Idempotent."""
        with self._changed:
            self._closed = True
            while self._sleeper:
                self._changed.wait(_LOOK_S)
            self._wake.close()
            # A method of the channel that owns us: a cycle, which would keep the mapping until the next collection.
            self._sidecar_alive = _nobody

    def _sleep(self, timeout_s: float) -> None:
        if self._sleeper:
            self._waiting += 1
            try:
                self._changed.wait(timeout_s)
            finally:
                self._waiting -= 1
            return
        self._sleeper = True
        self._changed.release()
        try:
            self._wake.wait(timeout_s)
        finally:
            self._changed.acquire()
            self._sleeper = False
            if self._waiting or self._closed:
                self._changed.notify_all()

    def _sort_arrivals(self) -> None:
        while self._reader.peek() is not None:
            claimed = self._reader.claim()
            if claimed is None:
                return
            if not self._sleeper:
                # With a sleeper the post stays and wakes it: what it waits for may be what we sort now.
                self._wake.consume()
            slot, seq = claimed
            try:
                header, values = self._read(slot, seq)
            except CorruptRecordError:
                self._counters.replies_corrupt += 1
            else:
                self._keep(header, values)
            self._reader.release(slot)

    def _read(self, slot: int, seq: int) -> tuple[RecordHeader, npt.NDArray[np.float32]]:
        ring = self._reader.ring
        at = ring.offset(slot)
        header = unpack_record(
            self._mapped[at : at + RECORD_HEADER_BYTES].tobytes(),
            generation=self._segment.header.generation,
            seq=seq,
            capacity=ring.capacity,
            kind=KIND_SCORES,
            channel=self._segment.name,
        )
        payload = self._mapped[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + header.payload_bytes]
        values = _CODEC.decode(payload.copy())["score"].values
        if len(values) != header.num_rows:
            raise CorruptRecordError(f"reply {seq} holds {len(values)} scores and says {header.num_rows}")
        return header, values

    def _keep(self, header: RecordHeader, values: npt.NDArray[np.float32]) -> None:
        self._counters.replies += 1
        pending = self._pending.get(header.request_id)
        fits = pending is not None and (
            header.parts == pending.parts and header.first_row + header.num_rows <= pending.num_rows
        )
        if pending is None or not fits:
            self._counters.replies_late += 1
            return
        pending.arrived[header.part] = (header, values)
        if self._waiting:
            self._changed.notify_all()


class ReplyOutbox:
    """The sidecar's end. It never waits: when the ring is full, nobody fetches, and the oldest reply goes."""

    def __init__(self, segment: Segment, wake: WakeUp, counters: HubCounters) -> None:
        self._segment = segment
        self._wake = wake
        self._counters = counters
        self._writer = RingWriter(reply_ring(segment))
        self._sending = threading.Lock()

    def send(
        self,
        request: RecordHeader,
        values: npt.NDArray[np.float32],
        model_version: int,
        sidecar_ns: int,
        trained_ns: int,
    ) -> bool:
        """Answer `request`. False when the operator is stuck in the mutex."""
        payload = _encode(values)
        nbytes = len(payload)
        with self._sending:
            slot = self._writer.reserve()
            if slot is None and self._writer.evict(below=2**62) is not None:
                self._wake.consume()
                self._counters.replies_dropped += 1
                slot = self._writer.reserve()
            if slot is None or nbytes > self._writer.ring.capacity:
                return False
            at = self._writer.ring.offset(slot)
            self._segment.memory[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + nbytes] = payload
            seq = self._writer.next_seq
            header = RecordHeader(
                KIND_SCORES, seq, nbytes, request.request_id, request.part, request.parts, request.first_row,
                request.num_rows, request.want_scores, None, model_version, time.monotonic_ns(), sidecar_ns,
                trained_ns,
            )  # fmt: skip
            self._segment.memory[at : at + RECORD_HEADER_BYTES] = header.pack(self._segment.header.generation)
            if not self._writer.commit(slot, seq):
                return False
            # Before the bookkeeping: an operator waits.
            self._wake.post()
        self._counters.replies_sent += 1
        return True

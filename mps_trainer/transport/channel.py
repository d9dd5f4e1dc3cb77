"""The operator's end of a channel.

send            consumes rows, produces records in feed slots; waits for room at most `block_timeout_s`
receive_scores  waits for the reply semaphore; unblocked by `Delivery.reply`, the sidecar's death, its time limit
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from mps_trainer.columns import Column, Rows
from mps_trainer.errors import TransportError
from mps_trainer.transport import layout, names, schema
from mps_trainer.transport.arrow import Bytes
from mps_trainer.transport.codec import Codec, Measured
from mps_trainer.transport.counters import ChannelCounters, Mirror, SendResult
from mps_trainer.transport.layout import LOCK_SIDECAR_LIFE, RECORD_HEADER_BYTES, RingSettings
from mps_trainer.transport.record import FLAG_WANT_SCORES, KIND_BATCH, RecordHeader, pack_whole
from mps_trainer.transport.replies import ReplyInbox, Scores, max_reply_rows
from mps_trainer.transport.ring import RingWriter, feed_ring
from mps_trainer.transport.room import Backpressure, Room
from mps_trainer.transport.segment import Segment, new_header
from mps_trainer.transport.semaphores import Doorbell, WakeUp
from mps_trainer.transport.small import SmallEncoder, place
from mps_trainer.transport.standing import Standing
from mps_trainer.transport.sweep import create_segment

log = logging.getLogger(__name__)


class OperatorChannel:
    """One segment of shared memory from this process to the run's sidecar, whether that is there yet or not."""

    def __init__(
        self, segment: Segment, codec: Codec, bell: Doorbell, backpressure: Backpressure, block_timeout_s: float
    ) -> None:
        """Use `create`."""
        self.name = segment.name
        self.segment = segment
        self.counters = ChannelCounters()
        self._codec = codec
        self._bell = bell
        self._block_timeout_s = block_timeout_s
        header = segment.header
        self._space = WakeUp(names.space_name(header.run_id, header.index), create=True)
        self._writer = RingWriter(feed_ring(segment))
        self._inbox = ReplyInbox(segment, self.counters, self.sidecar_alive)
        self._status = segment.words(layout.SIDECAR_WORDS, 4)
        self._standing = Standing(segment, self._status)
        self._generation = header.generation
        self._mirror = Mirror(segment, layout.OPERATOR_COUNTERS, self.counters)
        self._mapped: Bytes = np.frombuffer(segment.memory, np.uint8)
        self._max_rows = max_reply_rows(header.settings)
        self._room = Room(backpressure, self._writer, self._space, self.counters, self._inbox)
        self._sending = threading.Lock()
        self._closed = False
        # With a checksum every payload is read again: the general way, which has it as an array.
        self._small = None if header.settings.checksum else SmallEncoder(codec.layout)

    @classmethod
    def create(
        cls,
        run_id: str,
        columns: Sequence[Column],
        settings: RingSettings,
        *,
        backpressure: Backpressure = "drop_oldest",
        block_timeout_s: float = 0.05,
    ) -> OperatorChannel:
        """Make a channel for this process and ring for the sidecar.

        Raises TransportError when /dev/shm has no room, ConfigError for impossible settings or columns.
        """
        description = schema.describe(columns)
        header = new_header(run_id, settings, backpressure, description, schema.digest(description))
        bell = Doorbell(run_id)
        try:
            segment = create_segment(header)
            try:
                channel = cls(segment, Codec(columns), bell, backpressure, block_timeout_s)
                segment.publish()
            except BaseException:
                segment.remove()
                segment.close()
                raise
        except BaseException:
            bell.close(unlink_if_alone=True)
            raise
        bell.post()
        return channel

    def __enter__(self) -> OperatorChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, rows: Rows, *, request_id: int, want_scores: bool) -> SendResult:
        """Send a batch, split by rows where it is larger than a slot. Back-pressure decides when there is no room.

        Waits at most `block_timeout_s` in all (policy `block`, and a batch of more parts than slots), plus the mutex's
        limit if the sidecar is stopped in it. Thread-safe.

        Raises ExperienceError for rows that do not fit the columns, TransportError when one row is larger than a slot
        when the sidecar has refused this channel, or when the segment was removed before a sidecar came.
        """
        small = None if self._small is None else self._small.encode(rows)
        if small is not None and small[0] <= self._max_rows and small[1] <= self._writer.ring.capacity:
            with self._sending:
                self._check_open()
                return self._send_whole(*small, request_id, want_scores)
        measured = self._codec.measure(rows)
        with self._sending:
            self._check_open()
            try:
                ranges = self._codec.split(measured, self._writer.ring.capacity, self._max_rows)
            except TransportError:
                self.counters.oversize += 1
                self._mirror.store()
                raise
            if want_scores:
                self._inbox.expect(request_id, len(ranges), measured.num_rows)
            result = SendResult(len(ranges), rows_dropped=measured.num_rows)
            try:
                for so_far in self._send_parts(measured, ranges, request_id, want_scores):
                    result = so_far
            finally:
                # Also when a part raised: what was committed before it is on its way.
                self.counters.add(result, self._writer.ring.mutex.timeouts)
                self._mirror.store()
                if result.parts_sent < result.parts and want_scores:
                    self._inbox.abandon(request_id)
        return result

    def receive_scores(self, request_id: int, timeout_s: float) -> Scores | None:
        """Wait for the scores of a batch that was sent with `want_scores`.

        Returns None when they are not there after `timeout_s`, when the run has no living sidecar, or when a part of
        the batch was dropped. Later replies to the request are then discarded. Blocks its thread; threads may wait for
        different requests at once.
        """
        return self._inbox.receive(request_id, timeout_s)

    def sidecar_alive(self) -> bool:
        """Whether the run has a sidecar whose process lives, zombies not counted. Costs a system call or two."""
        return self.segment.alive(LOCK_SIDECAR_LIFE) or self._bell.claimed

    def backlog(self) -> int:
        """Records that are committed and not yet acknowledged."""
        return self._writer.ring.num_slots - self._writer.ring.count(0)

    def unread_rows(self) -> int:
        """Rows of the records in `backlog`."""
        return self._room.rows_in_use()

    def close(self) -> None:
        """Close this end. Idempotent.

        A segment that holds records, or that a sidecar is attached to, stays: the sidecar, or its successor, drains and
        removes it. So does one whose rows were dropped, so that a successor counts them. Another one is removed here.
        """
        with self._sending:
            if self._closed:
                return
            self._closed = True
            self._mirror.store()
            self._inbox.close()
            self._post_bell()
            if self.backlog() == 0 and not (self.counters.rows_dropped_oldest or self.counters.rows_dropped_newest):
                self.segment.remove()
            # What is left unread has a bound: `reclaim_orphans` at the next channel, `remove_run` at the run's end.
            self.segment.locks.close()
            # Rung after the lock has dropped: the sidecar that wakes finds this operator gone.
            self._bell.post()
            self._space.close()
            self._bell.close(unlink_if_alone=True)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"channel {self.name} is closed", "create a new channel")
        self._standing.check()

    def _send_whole(
        self, num_rows: int, nbytes: int, payload: bytes | list[Any], request_id: int, want_scores: bool
    ) -> SendResult:
        """One record whose bytes are ready: what `_send_parts` does, without what only batches of many rows need."""
        slot, evicted = self._writer.known_free, 0
        if slot is None:
            deadline = time.monotonic() + self._block_timeout_s
            slot, evicted = self._room.find(self._writer.next_seq, deadline, self._bell, self.sidecar_alive)
        if want_scores:
            # Between finding the slot and using it, as in `_send_parts`.
            self._inbox.expect(request_id, 1, num_rows, collect=True)
        sent = False
        if slot is not None:
            memory, seq, at = self.segment.memory, self._writer.next_seq, self._writer.ring.offset(slot)
            flags = FLAG_WANT_SCORES if want_scores else 0
            if isinstance(payload, bytes):
                memory[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + nbytes] = payload
            else:
                place(payload, self._mapped[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + nbytes])
            memory[at : at + RECORD_HEADER_BYTES] = pack_whole(
                self._generation, seq, nbytes, request_id, num_rows, flags
            )
            sent = self._commit(slot, seq, num_rows, request_id)
        if sent:
            result = SendResult(1, 1, num_rows, 0, evicted, nbytes)
        else:
            result = SendResult(1, 0, 0, num_rows, evicted, 0)
            if want_scores:
                self._inbox.abandon(request_id)
        self.counters.add(result, self._writer.ring.mutex.timeouts)
        self._mirror.store()
        return result

    def _send_parts(
        self, measured: Measured, ranges: Sequence[tuple[int, int]], request_id: int, want_scores: bool
    ) -> Iterator[SendResult]:
        """Send part after part; after each yields what has become of the batch so far."""
        first_seq = self._writer.next_seq
        deadline = time.monotonic() + self._block_timeout_s
        sent = rows_sent = nbytes = evicted = 0
        mutex = self._writer.ring.mutex
        timeouts = mutex.timeouts
        for part, (start, stop) in enumerate(ranges):
            slot, rows_evicted = self._room.find(first_seq, deadline, self._bell, self.sidecar_alive)
            if mutex.timeouts > timeouts:
                # The sidecar is stopped inside the mutex: one time limit is enough for one batch.
                return
            evicted += rows_evicted
            if want_scores:
                # Between finding the slot and using it: then no more replies can come than their ring holds.
                self._inbox.collect()
            size = self._send_part(slot, measured, (start, stop), (part, len(ranges)), request_id, want_scores)
            if size:
                sent, rows_sent, nbytes = sent + 1, rows_sent + stop - start, nbytes + size
            yield SendResult(len(ranges), sent, rows_sent, measured.num_rows - rows_sent, evicted, nbytes)

    def _send_part(
        self,
        slot: int | None,
        measured: Measured,
        rows: tuple[int, int],
        part: tuple[int, int],
        request_id: int,
        want_scores: bool,
    ) -> int:
        if slot is None:
            return 0
        start, stop = rows
        message = self._codec.message(measured, start, stop)
        at = self._writer.ring.offset(slot)
        payload = self._mapped[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + message.nbytes]
        self._codec.write(measured, start, stop, message, payload)
        seq = self._writer.next_seq
        header = RecordHeader(
            kind=KIND_BATCH,
            seq=seq,
            payload_bytes=message.nbytes,
            request_id=request_id,
            part=part[0],
            parts=part[1],
            first_row=start,
            num_rows=stop - start,
            want_scores=want_scores,
            payload_crc=zlib.crc32(payload.data) if self.segment.header.settings.checksum else None,
            sent_ns=time.monotonic_ns(),
        )
        self.segment.memory[at : at + RECORD_HEADER_BYTES] = header.pack(self._generation)
        return message.nbytes if self._commit(slot, seq, stop - start, request_id) else 0

    def _commit(self, slot: int, seq: int, num_rows: int, request_id: int) -> bool:
        """Make the record that is complete in `slot` READY and ring for it. False when the sidecar is stuck."""
        self._room.note(slot, num_rows, request_id)
        if not self._writer.commit(slot, seq):
            return False
        self._post_bell()
        self._space.consume()
        return True

    def _post_bell(self) -> None:
        inode = self._status[1]
        if inode and inode != self._bell.inode:
            # A successor of the sidecar had to make a new bell; the old one rings in an empty room.
            try:
                bell = Doorbell(self.segment.header.run_id)
            except TransportError as error:
                # The record is committed already, and the sidecar looks by itself within a second.
                log.warning("%s: %s", self.name, error)
                return
            self._bell.close()
            self._bell = bell
        self._bell.post()

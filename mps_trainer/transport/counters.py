"""Counters of both ends. Each side keeps its own and mirrors them into its part of the header page, for the
other to read.

The mirror is information, not protocol: a kill between two stores may leave it one record behind.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from mps_trainer.transport import layout
from mps_trainer.transport.segment import Segment


@dataclass
class ChannelCounters:
    """What an operator has sent, and what became of what it could not send.

    Attributes:
        records_sent, rows_sent, bytes_sent: committed to the ring.
        dropped_oldest, rows_dropped_oldest: committed earlier, then removed unread to make room (drop_oldest).
        dropped_newest, rows_dropped_newest: never committed for lack of room (drop_newest, block after its limit).
        oversize: batches refused because one row did not fit a slot.
        blocked_ns: time spent waiting for room.
        lock_timeouts: the sidecar kept a ring's mutex for longer than its limit (it was stopped).
        replies: reply records received.
        replies_late: reply records for a request that nobody waited for any more.
        replies_corrupt: reply records that did not add up.
    """

    records_sent: int = 0
    rows_sent: int = 0
    bytes_sent: int = 0
    dropped_oldest: int = 0
    rows_dropped_oldest: int = 0
    dropped_newest: int = 0
    rows_dropped_newest: int = 0
    oversize: int = 0
    blocked_ns: int = 0
    lock_timeouts: int = 0
    replies: int = 0
    replies_late: int = 0
    replies_corrupt: int = 0

    @property
    def blocked_s(self) -> float:
        """Seconds spent waiting for room."""
        return self.blocked_ns / 1e9

    def add(self, result: SendResult, lock_timeouts: int) -> None:
        """Count what became of one batch."""
        self.records_sent += result.parts_sent
        self.rows_sent += result.rows_sent
        self.bytes_sent += result.nbytes
        self.dropped_newest += result.parts - result.parts_sent
        self.rows_dropped_newest += result.rows_dropped
        self.lock_timeouts = lock_timeouts


@dataclass
class HubCounters:
    """What the sidecar has done with one channel.

    Attributes:
        received: records claimed, those delivered again included.
        released: records acknowledged.
        recovered: records that a dead sidecar had claimed and that were made ready again.
        corrupt: records that did not add up and were skipped.
        replies_sent, replies_dropped: replies committed; older replies removed because nobody fetched them.
        lingering: slots held at this moment by views that outlived their delivery.
    """

    received: int = 0
    released: int = 0
    recovered: int = 0
    corrupt: int = 0
    replies_sent: int = 0
    replies_dropped: int = 0
    lingering: int = 0


class SendResult(NamedTuple):
    """What became of one batch.

    Attributes:
        parts: records that the batch was split into.
        parts_sent, rows_sent, nbytes: committed; `nbytes` counts payload.
        rows_dropped: rows of this batch that found no room.
        rows_evicted: rows of earlier batches that made room for it unread.
    """

    parts: int
    parts_sent: int = 0
    rows_sent: int = 0
    rows_dropped: int = 0
    rows_evicted: int = 0
    nbytes: int = 0


class Mirror:
    """Stores a counters object as 8-byte words in a segment."""

    def __init__(self, segment: Segment, offset: int, counters: Any) -> None:
        self._values = vars(counters).values()
        self._memory, self._offset = segment.memory, offset
        self._words = struct.Struct(f"@{len(fields(counters))}Q")

    def store(self) -> None:
        """Copy the counters to the segment."""
        self._words.pack_into(self._memory, self._offset, *self._values)


def dropped_rows(descriptor: int) -> int:
    """Rows that the operator of a segment file says to have dropped; 0 where it says nothing."""
    words = struct.Struct(f"@{len(fields(ChannelCounters))}Q")
    raw = os.pread(descriptor, words.size, layout.OPERATOR_COUNTERS)
    if len(raw) < words.size:
        return 0
    found = ChannelCounters(*words.unpack(raw))
    return found.rows_dropped_oldest + found.rows_dropped_newest


def load_operator_counters(segment: Segment, offset: int) -> ChannelCounters:
    """The counters that the operator of a segment last stored."""
    return ChannelCounters(*segment.words(offset, len(fields(ChannelCounters))).tolist())

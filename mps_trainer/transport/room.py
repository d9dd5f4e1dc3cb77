"""Where the next record of an operator goes: a free slot, one that is made free by the channel's policy, or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from mps_trainer.transport.counters import ChannelCounters
from mps_trainer.transport.replies import ReplyInbox
from mps_trainer.transport.ring import RingWriter
from mps_trainer.transport.semaphores import Doorbell, WakeUp

Backpressure = Literal["drop_oldest", "drop_newest", "block"]


class Room:
    """Finds slots of one feed ring. Not thread-safe: its channel serialises."""

    def __init__(
        self, policy: Backpressure, writer: RingWriter, space: WakeUp, counters: ChannelCounters, inbox: ReplyInbox
    ) -> None:
        self._policy = policy
        self._writer = writer
        self._space = space
        self._counters = counters
        self._inbox = inbox
        self._rows = [0] * writer.ring.num_slots
        self._requests = [0] * writer.ring.num_slots

    def note(self, slot: int, num_rows: int, request_id: int) -> None:
        """Keep in mind what is about to be committed to `slot`: what its eviction would cost."""
        self._rows[slot] = num_rows
        self._requests[slot] = request_id

    def rows_in_use(self) -> int:
        """Rows of the records that hold a slot now."""
        used = self._writer.ring.used()
        return sum(rows for rows, holds in zip(self._rows, used, strict=True) if holds)

    def find(
        self, first_seq: int, deadline: float, bell: Doorbell, sidecar_alive: Callable[[], bool]
    ) -> tuple[int | None, int]:
        """A free slot, and how many rows were evicted for it. `first_seq` begins the batch that must not evict itself.

        Waits until `deadline` (monotonic seconds) where the policy says so; `bell` is the one that evicted records
        have rung.
        """
        timeouts = self._writer.ring.mutex.timeouts
        slot = self._writer.reserve()
        if slot is not None or self._policy == "drop_newest" or self._writer.ring.mutex.timeouts > timeouts:
            return slot, 0
        if self._policy == "drop_oldest":
            victim = self._writer.evict(below=first_seq)
            if victim is not None:
                rows = self._rows[victim[0]]
                bell.consume()
                self._counters.dropped_oldest += 1
                self._counters.rows_dropped_oldest += rows
                self._inbox.abandon(self._requests[victim[0]])
                return self._writer.reserve(), rows
            if first_seq == self._writer.next_seq:
                # Nothing can be evicted: the sidecar is reading every slot.
                return self._writer.reserve(), 0
        # Only parts of this very batch are in the way (or the policy is to wait): the sidecar may make room.
        return self._wait(deadline, sidecar_alive), 0

    def _wait(self, deadline: float, sidecar_alive: Callable[[], bool]) -> int | None:
        started_ns = time.monotonic_ns()
        slot = None
        while slot is None and sidecar_alive():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            self._space.wait(remaining_s)
            slot = self._writer.reserve()
        self._counters.blocked_ns += time.monotonic_ns() - started_ns
        return slot

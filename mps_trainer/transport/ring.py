"""A ring of slots between one writer and one reader: the protocol, and nothing of what the bytes mean.

One 8-byte word per slot says all there is: `seq << 2 | state`. Every transition is one aligned store of that word.
Payload and record header are written before and read after it, outside any lock.

    writer   FREE ----commit----> READY                     (payload and header are complete before)
    writer   READY ---evict-----> FREE                      (policy drop_oldest)
    reader   READY ---claim-----> READING                   (lowest seq first)
    reader   READING -release---> FREE                      (acknowledged)
    reader   READING -recover---> READY                     (a new reader, after the old one's life lock dropped)

Claim and evict exclude each other by the ring's `ByteMutex`, as they may want the same record. Commit, release, and
claim where nothing evicts touch a slot that nobody else may touch, so they need memory order only (see `locks`).

What a SIGKILL leaves, at any instruction: before the store the old state, after it the new one. A writer that dies
before its commit leaves a FREE slot; a reader that dies before its release leaves READING, which its successor
turns back into READY, so that the record is delivered again. Nobody can die holding the mutex, because the
kernel drops it.

Slots are reused lowest index first, which keeps the working set in the cache; order is carried by `seq`.
"""

from __future__ import annotations

import enum

from mps_trainer.transport import layout, locks
from mps_trainer.transport.layout import RECORD_HEADER_BYTES
from mps_trainer.transport.locks import ByteMutex
from mps_trainer.transport.segment import Segment

FREE, READY, READING = 0, 1, 2
_STATE = 3
_MAX_SEQ = 2**48


class Released(enum.Enum):
    """What became of a release."""

    STUCK, QUIETLY, WAKE = range(3)


class Ring:
    """What writer and reader share: the words, the places of the slots, the mutex."""

    def __init__(
        self, segment: Segment, *, states: int, first_slot: int, num_slots: int, stride: int, slot_bytes: int,
        lock: int, evicts: bool,
    ) -> None:  # fmt: skip
        self.num_slots = num_slots
        self.capacity = slot_bytes - RECORD_HEADER_BYTES
        #: Whether reading all state words costs more than a look at those where the next record is likely to be.
        self.many = num_slots > 8
        self.words = segment.words(states, num_slots)
        self._offsets = [first_slot + slot * stride for slot in range(num_slots)]
        self.evicts = evicts
        self._locks = segment.locks
        self.mutex = ByteMutex(segment.locks, lock)

    def offset(self, slot: int) -> int:
        """Where slot `slot` begins in the segment: its record header, then its payload."""
        return self._offsets[slot]

    def oldest_ready(self, below: int = 2**62, likely: int = 0, beside: int = 0) -> tuple[int, int] | None:
        """(slot, seq) of the READY record with the lowest seq under `below`. Without the mutex only a hint.

        `likely` is the seq after the last one that was read: nothing older can be READY, so it is looked for first, in
        slot `beside`, the lowest slot and then all of them.
        """
        word = likely << 2 | READY
        if self.words[beside] == word:
            return beside, likely
        if self.words[0] == word:
            return 0, likely
        words = self.words.tolist()
        if word in words:
            return words.index(word), likely
        if not any(words):
            return None
        best, found = below, -1
        for slot, word in enumerate(words):
            if word & _STATE == READY and word >> 2 < best:
                best, found = word >> 2, slot
        return (found, best) if found >= 0 else None

    def enter_order(self) -> bool:
        """Begin a section that needs memory order but no exclusion. False when the other side is stuck in the mutex.

        Raises TransportError when the segment is closed, or in a forked child: a second writer would ruin the ring.
        """
        if self._locks.fd < 0:
            self._locks.check_open()
        return locks.TOTAL_STORE_ORDER or self.mutex.acquire()

    def leave_order(self) -> None:
        """End a section begun by `enter_order`."""
        if not locks.TOTAL_STORE_ORDER:
            self.mutex.release()

    def count(self, state: int) -> int:
        """How many slots are in `state`, as a snapshot."""
        return sum(word & _STATE == state for word in self.words.tolist())

    def used(self) -> list[bool]:
        """Of each slot, whether it holds a record, as a snapshot."""
        return [word & _STATE != 0 for word in self.words.tolist()]


class RingWriter:
    """The writer's moves. Not thread-safe: its owner serialises."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        # After a predecessor's records; a number that no ring can have reached is a corrupt word, and would overflow.
        self.next_seq = 1 + max((seq for word in ring.words.tolist() if (seq := word >> 2) < _MAX_SEQ), default=0)
        self.known_free: int | None = None

    def reserve(self) -> int | None:
        """The lowest FREE slot, or None when there is none or the reader is stuck in the mutex."""
        if self.known_free is not None:
            return self.known_free
        if not self.ring.enter_order():
            return None
        try:
            self._find_free()
        finally:
            self.ring.leave_order()
        return self.known_free

    def commit(self, slot: int, seq: int) -> bool:
        """Make the slot READY; its header and payload are complete. False when the reader is stuck in the mutex."""
        ring = self.ring
        if not ring.enter_order():
            return False
        try:
            words = ring.words
            words[slot] = seq << 2 | READY
            # A slot seen FREE stays FREE, as only we change that: the next reserve need not look. Two likely slots
            # before all of them: the lowest, and where many small records wait for a slow reader, the next one.
            if words[0] == FREE:
                self.known_free = 0
            elif ring.many and slot + 1 < ring.num_slots and words[slot + 1] == FREE:
                self.known_free = slot + 1
            else:
                self._find_free()
        finally:
            ring.leave_order()
        self.next_seq = seq + 1
        return True

    def evict(self, below: int) -> tuple[int, int] | None:
        """Free the oldest READY record with a seq under `below`; (slot, seq) of what was dropped, or None."""
        if not self.ring.mutex.acquire():
            return None
        try:
            victim = self.ring.oldest_ready(below)
            if victim is not None:
                self.ring.words[victim[0]] = FREE
            self._find_free()
        finally:
            self.ring.mutex.release()
        return victim

    def _find_free(self) -> None:
        try:
            self.known_free = self.ring.words.tolist().index(FREE)
        except ValueError:
            self.known_free = None


class RingReader:
    """The reader's moves. `release` may be called from any thread."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._likely = 0
        # The slot beside the last one that was read, where a writer that is ahead has put the record `_likely`.
        self._beside = 0
        # Releases since the last WAKE, for the whole ring; a count that two threads spoil wakes a little early or late.
        self._quiet = 0

    def peek(self) -> tuple[int, int] | None:
        """(slot, seq) of the oldest READY record as a hint, or None."""
        return self.ring.oldest_ready(likely=self._likely, beside=self._beside)

    def ready(self) -> bool:
        """Whether a record is READY, as a hint."""
        return self.peek() is not None

    def claim(self) -> tuple[int, int] | None:
        """Take the oldest READY record: (slot, seq). None when there is none or the writer is stuck in the mutex."""
        ring = self.ring
        if not (ring.mutex.acquire() if ring.evicts else ring.enter_order()):
            return None
        try:
            found = ring.oldest_ready(likely=self._likely, beside=self._beside)
            if found is not None and found[1] != self._likely:
                # A scan is no snapshot: it may have passed a slot just before an older record was committed there. What
                # is older than a record that we have seen is committed by now, and nobody can evict it from under us,
                # so that a second scan finds the oldest.
                found = ring.oldest_ready(likely=self._likely)
            if found is not None:
                slot, seq = found
                ring.words[slot] = seq << 2 | READING
                self._likely = seq + 1
                self._beside = slot + 1 if slot + 1 < ring.num_slots else 0
        finally:
            if ring.evicts:
                ring.mutex.release()
            else:
                ring.leave_order()
        return found

    def release(self, slot: int) -> Released:
        """Give the slot back: its record is acknowledged. STUCK when the writer is stuck in the mutex; try again.

        WAKE when a waiting writer should be woken. In a ring of many slots that is not at every slot: a writer and a
        reader that wake each other for every small record spend their time in the scheduler.
        """
        ring = self.ring
        if not ring.enter_order():
            return Released.STUCK
        try:
            ring.words[slot] = FREE
            if ring.words[self._beside] == self._likely << 2 | READY:
                # The reader goes on with that record: every quarter of the ring is soon enough.
                self._quiet += 4
                wake = self._quiet >= ring.num_slots
            else:
                words = ring.words.tolist()
                wake = 4 * words.count(FREE) >= ring.num_slots or (self._likely << 2 | READY) not in words
        finally:
            ring.leave_order()
        if not wake:
            return Released.QUIETLY
        self._quiet = 0
        return Released.WAKE

    def recover(self) -> int:
        """Turn what a dead reader left READING back to READY, and words that mean nothing to FREE. Returns how many.

        Only for the holder of the reader's life lock, before its first claim.
        """
        changed = 0
        if not self.ring.mutex.acquire():
            return -1
        try:
            for slot, word in enumerate(self.ring.words.tolist()):
                if word & _STATE == READING:
                    self.ring.words[slot] = word >> 2 << 2 | READY
                elif word & _STATE != READY and word:
                    self.ring.words[slot] = FREE
                else:
                    continue
                changed += 1
        finally:
            self.ring.mutex.release()
        return changed


def feed_ring(segment: Segment) -> Ring:
    """The ring from the operator to the sidecar."""
    h = segment.header
    return Ring(
        segment, states=layout.FEED_STATES, first_slot=h.header_bytes, num_slots=h.settings.num_slots,
        stride=h.feed_stride, slot_bytes=h.settings.slot_bytes, lock=layout.LOCK_FEED, evicts=h.policy == "drop_oldest",
    )  # fmt: skip


def reply_ring(segment: Segment) -> Ring:
    """The ring from the sidecar back to the operator."""
    h = segment.header
    return Ring(
        segment, states=layout.REPLY_STATES, first_slot=h.reply_offset, num_slots=h.settings.reply_slots,
        stride=h.reply_stride, slot_bytes=h.settings.reply_slot_bytes, lock=layout.LOCK_REPLY, evicts=True,
    )  # fmt: skip

"""Experiences that were dropped on the way, over all operators of the run so far, those of earlier lives included."""

from __future__ import annotations

from mps_trainer.run import Status
from mps_trainer.transport import SidecarHub


class Dropped:
    """Counts them, for operators that live and for those that have died.

    A channel keeps its own count, so a successor reads that of living operators again. What was counted in channels
    that are removed is in the status alone, and a successor goes on from there.

    Args:
        status: as the predecessor left it; `lost_oldest_gone` and `lost_newest_gone` are kept up here.
    """

    def __init__(self, hub: SidecarHub, status: Status) -> None:
        self._hub = hub
        self._status = status
        self._last: dict[str, tuple[int, int]] = {}

    def counts(self) -> dict[str, int]:
        """Experiences that never arrived, by the policy that dropped them."""
        now = {
            f"{producer.name} {producer.generation}": (
                producer.sent.rows_dropped_oldest,
                producer.sent.rows_dropped_newest,
            )
            for producer in self._hub.producers()
        }
        # Reaped, or removed by somebody else: either way nobody counts it any more.
        for gone in self._last.keys() - now.keys():
            self._status.lost_oldest_gone += self._last[gone][0]
            self._status.lost_newest_gone += self._last[gone][1]
        self._last = now
        oldest, newest = (sum(count[i] for count in now.values()) for i in (0, 1))
        return {
            "oldest": oldest + self._status.lost_oldest_gone,
            "newest": newest + self._status.lost_newest_gone,
        }

    def reap(self) -> bool:
        """Remove the channels of dead operators, and remember what those had dropped; whether that is to be saved."""
        before = self._status.lost_oldest_gone + self._status.lost_newest_gone
        # It may have dropped some since the last look.
        self.counts()
        if not self._hub.reap():
            return False
        self.counts()
        return self._status.lost_oldest_gone + self._status.lost_newest_gone > before

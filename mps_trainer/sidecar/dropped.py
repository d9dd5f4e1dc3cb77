"""Experiences that were dropped on the way, over all operators of the run so far."""

from __future__ import annotations

from mps_trainer.transport import SidecarHub


class Dropped:
    """Counts them, for operators that live and for those that have died."""

    def __init__(self, hub: SidecarHub) -> None:
        self._hub = hub
        self._gone: dict[str, int] = {}

    def counts(self) -> dict[str, int]:
        """Experiences that never arrived, by the policy that dropped them."""
        sent = [producer.sent for producer in self._hub.producers()]
        return {
            "oldest": sum(counters.rows_dropped_oldest for counters in sent) + self._gone.get("oldest", 0),
            "newest": sum(counters.rows_dropped_newest for counters in sent) + self._gone.get("newest", 0),
        }

    def reap(self) -> None:
        """Remove the channels of dead operators, and remember what those had dropped."""
        before = self.counts()
        if self._hub.reap():
            after = self.counts()
            for name, count in before.items():
                self._gone[name] = self._gone.get(name, 0) + count - after[name]

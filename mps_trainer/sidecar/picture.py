"""What the sidecar says of itself, kept fresh: `status.json`, and the gauges of a batch's line in metrics.jsonl."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from mps_trainer.run import State
from mps_trainer.run.process import resident_bytes
from mps_trainer.sidecar.answering import Answering
from mps_trainer.sidecar.dropped import Dropped
from mps_trainer.sidecar.own_files import OwnFiles
from mps_trainer.sidecar.pace.gate import Pace
from mps_trainer.sidecar.startup import Learning
from mps_trainer.transport import SidecarHub

#: Seconds between two pictures while nothing changes the state. One costs about 0.2 ms.
_EVERY_S = 1.0
# Who waits for these wants the batch to be done, its line in metrics.jsonl included.
_OF_WHOLE_BATCHES = ("batches", "experiences", "duplicates", "scored", "auc", "first_auc")


class Picture:
    """Fills in a `Status` and saves it.

    Args:
        own: whose status is of this life; what others set in it (state, error, trouble) is saved as it is.
        answering: knows the age and the latency of scores.
    """

    def __init__(
        self, own: OwnFiles, learning: Learning, hub: SidecarHub, dropped: Dropped, answering: Answering, pace: Pace
    ) -> None:
        self._pace = pace
        self._own = own
        self._learning = learning
        self._hub = hub
        self._dropped = dropped
        self._answering = answering

    def gauges(self) -> dict[str, Any]:
        """What is measured and not counted, as it is now; sizes in bytes, None where there is nothing to measure."""
        producers = self._hub.producers()
        waiting = [p.waiting_since_ns for p in producers if p.waiting_since_ns is not None]
        return {
            "backlog": sum(producer.backlog for producer in producers),
            "backlog_age_s": round(max(0, time.monotonic_ns() - min(waiting)) / 1e9, 3) if waiting else 0.0,
            "dropped": self._dropped.counts(),
            "memory_bytes": resident_bytes(),
            "gpu_memory_bytes": _device_bytes(self._learning.learner.trainer.device),
        }

    def of_pace(self) -> dict[str, Any]:
        """What a batch's line says of the pace; nothing where there is none."""
        status = self._own.status
        self._pace.describe(status)
        if not status.pace_source:
            return {}
        return {
            "pace_share": status.pace_share,
            "pace_slowdown": status.pace_slowdown,
            "pace_source": status.pace_source,
            "steps_skipped": self._learning.learner.counters.steps_skipped,
        }

    def set_state(self, state: State) -> None:
        """A new state, saved at once."""
        self._own.status.state = state
        self.save()

    def save(self) -> None:
        """Write status.json. Amid a batch's steps nothing of that batch is counted yet but the steps."""
        status, learner, ring = self._own.status, self._learning.learner, self._learning.ring
        gauges = self.gauges()
        lost = gauges.pop("dropped")
        values = {**dataclasses.asdict(learner.counters), **gauges, "lost_oldest": lost["oldest"]}
        if learner.batch_is_in:
            values = {name: value for name, value in values.items() if name not in _OF_WHOLE_BATCHES}
        for name, value in values.items():
            setattr(status, name, value)
        status.lost_newest = lost["newest"]
        self._answering.describe(status)
        self._pace.describe(status)
        status.steps_owed = learner.steps_due
        status.version = learner.trainer.step
        status.damaged_records = self._learning.journal.damaged
        status.set_aside = self._learning.aside.count
        status.replay_size = len(learner.replay)
        status.memory_cap_bytes = self._learning.memory_cap
        status.ring_registered = ring.registered if ring is not None else None
        self._own.save_status()

    def refresh(self) -> None:
        """Save if the last time is a while ago; cheap otherwise."""
        if time.monotonic() - self._own.saved_at > _EVERY_S:
            self.save()


def _device_bytes(device: torch.device) -> int | None:
    # The peak: what the reservation has to hold. What PyTorch has reserved is constant on a shared GPU.
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None

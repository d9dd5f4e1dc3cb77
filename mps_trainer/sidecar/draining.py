"""The end of the sidecar's loop: what is in the rings is saved, and what the time allows is scored and trained on.

    rings > journal | scores, if asked > records of the journal > steps that are due > checkpoint

With a pace steps are taken beside an idle engine only. What is owed beside a busy one is in the checkpoint, for the
successor or for a run that goes on later.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mps_trainer.run.doing import Stage
from mps_trainer.sidecar.learner import RecordName
from mps_trainer.sidecar.noting import Note
from mps_trainer.sidecar.pace.gate import Pace
from mps_trainer.sidecar.saving import Saving
from mps_trainer.sidecar.startup import Learning
from mps_trainer.transport import Delivery, SidecarHub

_log = logging.getLogger(__name__)
#: For scores, records and steps at the end: well below the supervisor's grace, which has to hold a checkpoint too.
DRAIN_S = 10.0


class Work(Protocol):
    """What the loop does with records and steps, and the drain too."""

    def receive(self) -> Delivery | None:
        """The next record of the rings."""

    def score(self, delivery: Delivery) -> None:
        """Answer it."""

    def catch_up(self, stop: Callable[[], bool]) -> bool:
        """Take one record of the journal; whether there may be more."""

    def train_due(self, stop: Callable[[], bool]) -> None:
        """Steps that are due, as far as the pace allows."""


@dataclass(frozen=True)
class Drain:
    """Run once.

    Attributes:
        paused: whether nothing may be launched now.
    """

    work: Work
    learning: Learning
    hub: SidecarHub
    pace: Pace
    note: Note
    saving: Saving
    paused: Callable[[], bool]

    def run(self, *, for_good: bool) -> None:
        """Until all is done or the time is over.

        Args:
            for_good: no other sidecar follows, as far as is known.
        """
        deadline = time.monotonic() + DRAIN_S

        def late() -> bool:
            return time.monotonic() >= deadline or self.paused()

        learner, journal = self.learning.learner, self.learning.journal
        self.pace.drain(for_good=for_good)
        self._empty_rings(late)
        behind = True
        while behind and not late():
            behind = self.work.catch_up(late)
        if not behind:
            learner.finish_open_batches()
            self.work.train_due(late)
        if learner.steps_due or journal.unread:
            _log.warning(
                "%s %d training steps were not taken and %d bytes of records wait in the journal",
                f"after {DRAIN_S:g} s of draining" if late() else "beside a busy engine",
                learner.steps_due, journal.unread,
            )  # fmt: skip
        self.saving.save_if_changed()

    def _empty_rings(self, late: Callable[[], bool]) -> None:
        """Everything into the journal first: that takes milliseconds, and what is there is not lost."""
        self.hub.find_new()
        # As many as there are now: an operator that goes on sending must not keep us here.
        for _ in range(sum(producer.backlog for producer in self.hub.producers())):
            delivery = self.work.receive()
            if delivery is None:
                return
            name = RecordName.of(delivery.header)
            if not self.learning.aside.takes(name, delivery.batch):
                if not self.learning.learner.knows(name):
                    self.note.stage(Stage.WRITING)
                    self.learning.journal.append(dataclasses.asdict(name), delivery.payload)
                if delivery.header.want_scores and not late():
                    self.work.score(delivery)
            delivery.release()

"""Training steps as the loop takes them: one at a time, without what is condemned, and told in the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from mps_trainer.sidecar.batch_report import BatchReport
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.set_aside import SetAside


class Steps:
    """Takes steps of a learner; each ends before anybody is asked again whether to stop.

    Args:
        before: called before each.
    """

    def __init__(
        self, learner: Learner, aside: SetAside, report: BatchReport, before: Callable[[], object] = lambda: None
    ) -> None:
        self._learner = learner
        self._aside = aside
        self._report = report
        self._before = before

    def take_due(self, stop: Callable[[], bool]) -> bool:
        """The steps that are due, until `stop`; whether none is left."""
        while self._learner.steps_due:
            if stop():
                return False
            self._aside.before_step(self._learner)
            if self._learner.steps_due:
                self._take()
        return True

    def take_another(self) -> None:
        """One step that is not due, if the schedule has it (`train: continuous`)."""
        self._aside.before_step(self._learner)
        if self._learner.may_train:
            self._take()

    def _take(self) -> None:
        self._before()
        begin = time.monotonic()
        loss = self._learner.train_step()
        self._report.stepped(loss, (time.monotonic() - begin) * 1e3)

"""Training steps as the loop takes them: one at a time, without what is condemned, and told in the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from mps_trainer.sidecar.batch_report import BatchReport
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.pace.gate import NoPace, Pace
from mps_trainer.sidecar.set_aside import SetAside


class Steps:
    """Takes steps of a learner; each ends before anybody is asked again whether to stop.

    Args:
        before: called before each.
        pace: says whether a step may be taken now.
    """

    def __init__(
        self,
        learner: Learner,
        aside: SetAside,
        report: BatchReport,
        before: Callable[[], object] = lambda: None,
        pace: Pace | None = None,
    ) -> None:
        self._learner = learner
        self._aside = aside
        self._report = report
        self._before = before
        self._pace = pace or NoPace()

    def take_due(self, stop: Callable[[], bool], record_overtakes: Callable[[], bool] = lambda: False) -> bool:
        """The steps that are due, until `stop` or as far as the pace allows; whether none is left.

        Args:
            record_overtakes: asked after each step, so that a record waits for one at most.
        """
        while self._learner.steps_due:
            if stop():
                return False
            self._aside.before_step(self._learner)
            if self._learner.steps_due:
                if not self._pace.may_step():
                    return False
                self._take()
                if record_overtakes():
                    return not self._learner.steps_due
        return True

    def take_another(self) -> None:
        """One step that is not due, if the schedule has it (`train: continuous`)."""
        self._aside.before_step(self._learner)
        if self._learner.may_train and self._pace.may_step():
            self._take()

    def _take(self) -> None:
        self._before()
        begin = time.monotonic()
        loss = self._learner.train_step()
        if loss is None:
            return
        seconds = time.monotonic() - begin
        self._pace.stepped(seconds)
        self._report.stepped(loss, seconds * 1e3)

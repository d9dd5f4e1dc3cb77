"""Between the steps of the sidecar and the controller: what is owed, the floor, and what is said of it.

A step that is refused stays owed and the loop goes on with records, scores, metrics and checkpoints; its loss is
told with the next batch. What is owed grows to the steps of the last `owed_batches` that brought any; the oldest
beyond are skipped and counted, but never while a step may be taken.

The floor of such a batch is taken in the gap or wherever else the pace allows it; what is left of it when the next one
comes is taken at once, whatever it costs, and said when that happens batch after batch.

At the end of the sidecar steps are taken beside an idle engine only; what is owed then is in the checkpoint.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from mps_trainer.config import Settings
from mps_trainer.run import Status
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.pace.controller import Controller
from mps_trainer.sidecar.pace.source import Sight, Source, now

_log = logging.getLogger(__name__)
#: Of the last so many batches, so many that got their floor by force are a contradiction.
_BATCHES, _TOO_MANY = 5, 3
#: Steps before anything is said of how long one takes.
_SOME_STEPS = 5


class Pace(Protocol):
    """What the loop asks."""

    @property
    def records_overtake(self) -> bool:
        """Whether records go before steps that are due, which may then have to wait for the pace."""

    def may_step(self) -> bool:
        """Whether the next step may be taken now."""

    def stepped(self, seconds: float) -> None:
        """It was taken."""

    def wait_s(self, otherwise: float) -> float:
        """How long the loop may wait for a record before it asks again."""

    def drain(self, *, for_good: bool) -> None:
        """The sidecar ends; `for_good`: no other follows, as far as is known."""

    def close(self) -> None:
        """Close what it looks at. Calling it again does nothing."""

    def describe(self, status: Status) -> None:
        """Fill in what `status.json` says of the pace."""


class NoPace:
    """Every step at once, in the order that a run always has."""

    records_overtake = False

    def may_step(self) -> bool:
        """Yes."""
        return True

    def stepped(self, seconds: float) -> None:
        """Nothing to learn."""

    def wait_s(self, otherwise: float) -> float:
        """As without a pace."""
        return otherwise

    def drain(self, *, for_good: bool) -> None:
        """Every step that is owed is taken, as always."""

    def close(self) -> None:
        """Nothing to close."""

    def describe(self, status: Status) -> None:
        """Nothing to say but what is owed."""


class Gate:
    """A pace by the controller.

    Args:
        source: where to look.
        settings: of the run.
    """

    records_overtake = True

    def __init__(self, source: Source, settings: Settings, learner: Learner) -> None:
        self._source, self._settings, self._learner = source, settings, learner
        self._controller = Controller(settings.max_rollout_slowdown, settings.pace_tuning)
        self._brought = owed_by_batch(learner.steps_due, settings)
        self._arrived = 0
        learner.on_due = self._falls_due
        self._floor = self._urgent = 0
        self._forced = False
        self._forced_batches: deque[bool] = deque(maxlen=_BATCHES)
        self._last_step = -1e9
        self._resting = self._draining = self._for_good = False
        self._sight = Sight("arrivals")
        self._told: set[str] = set()

    def may_step(self) -> bool:
        """Whether the next step may be taken now."""
        moment = now()
        self._sight = self._source.look(moment, self._last_step, self._controller.silent_s)
        self._count_batches()
        allowed = self._controller.may_step(moment, self._sight.load, busy=self._sight.busy)
        if self._draining:
            allowed = not self._controller.busy or (self._for_good and self._nobody_can_tell)
        elif not allowed and self._urgent:
            allowed = True
            self._forced = self._forced or self._controller.in_debt
        self._resting = not allowed
        return allowed

    def stepped(self, seconds: float) -> None:
        """A step has been taken."""
        self._last_step = now()
        self._controller.stepped(seconds)
        if self._urgent:
            self._urgent -= 1
        elif self._floor:
            self._floor -= 1
        self._speak()

    def wait_s(self, otherwise: float) -> float:
        """Short while steps wait for the pace, and none before it was asked; a record ends the wait sooner."""
        due = self._learner.steps_due
        if self._resting and (due or self._learner.may_train):
            return min(otherwise or 1.0, self._controller.rest_s())
        return 0.0 if due else otherwise

    def drain(self, *, for_good: bool) -> None:
        """From now on no floor and no account: a step beside an idle engine, or none."""
        self._draining, self._for_good = True, for_good

    def close(self) -> None:
        """Close the files of engines."""
        self._source.close()

    def describe(self, status: Status) -> None:
        """As it is now."""
        told = self._controller.tell()
        status.pace_source = self._sight.source
        status.pace_share = None if told.share is None else round(told.share, 4)
        status.pace_slowdown = None if told.slowdown is None else round(told.slowdown, 4)
        status.pace_note = " ".join(self._notes().values())

    @property
    def _nobody_can_tell(self) -> bool:
        return self._sight.load is None and self._sight.busy is None

    def _falls_due(self, steps: int) -> None:
        self._brought.append(steps)
        self._arrived += 1
        # Also beside an idle engine: a trainer that falls behind for ever must not make scores late for ever.
        self._skip_oldest()

    def _count_batches(self) -> None:
        if self._arrived:
            self._forced_batches.append(self._forced)
            self._forced = False
            floor = self._settings.min_steps_per_batch * self._arrived
            self._urgent += self._floor
            self._floor = floor
            if self._sight.source == "arrivals":
                # A batch that has just come is the one sign of a gap that there is.
                self._urgent, self._floor = self._urgent + floor, 0
            self._arrived = 0
        self._bound_floor()

    def _skip_oldest(self) -> None:
        too_many = self._learner.steps_due - sum(self._brought)
        if too_many > 0:
            self._learner.skip(too_many)
            self._bound_floor()

    def _bound_floor(self) -> None:
        self._urgent = min(self._urgent, self._learner.steps_due)
        self._floor = min(self._floor, self._learner.steps_due - self._urgent)

    def _notes(self) -> dict[str, str]:
        notes, told, step_s = {}, self._controller.tell(), self._controller.step_s
        settings = self._settings
        if sum(self._forced_batches) >= _TOO_MANY:
            notes["floor"] = (
                f"min_steps_per_batch {settings.min_steps_per_batch} costs the rollout more than max_rollout_slowdown "
                f"{settings.max_rollout_slowdown:g}: the floor wins; lower the one or raise the other."
            )
        taken = self._learner.trainer.step
        if told.slice_s is not None and step_s is not None and taken >= _SOME_STEPS and step_s > told.slice_s:
            notes["slice"] = (
                f"one step takes {1e3 * step_s:.0f} ms, longer than the {1e3 * told.slice_s:.0f} ms that fit beside "
                "the rollout: lower batch_size."
            )
        return notes

    def _speak(self) -> None:
        for kind, note in self._notes().items():
            if kind not in self._told:
                self._told.add(kind)
                _log.warning("pace: %s", note)


def owed_by_batch(due: int, settings: Settings) -> deque[int]:
    """What a learner owes as a checkpoint left it, cut into batches, the oldest first; as one if none can tell."""
    each = (settings.steps_per_batch if settings.schedule.train == "steps" else 0) or max(due, 1)
    whole, rest = divmod(due, each)
    return deque(([rest] if rest else []) + [each] * whole, maxlen=settings.pace_tuning.owed_batches)

"""The learner: what a record does to the model. Live records and records of the journal take this one path.

    record --evaluate--> running AUC (the model has not seen it)
           --take------> replay buffer, and steps fall due with the last part of a batch (`schedule.train`)
           --train-----> one step at a time, until none is due; with `train: continuous`, while `may_train`

Everything that the weights depend on is here and is saved in `state`. So a successor that starts from a checkpoint
and takes the journal's records in their order arrives at the very weights of a sidecar that was never killed; not with
a pace or `train: continuous`, where the clock says when a step is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mps_trainer.columns import Array, PackedBatch
from mps_trainer.config import Settings
from mps_trainer.sidecar.auc import RunningAuc, area_under_curve
from mps_trainer.sidecar.passes import Passes
from mps_trainer.sidecar.replay import Draw, Empty, ReplayBuffer
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.transport import RecordHeader

#: At most one record is in flight when a sidecar dies, so a few remembered names are plenty.
_REMEMBERED_RECORDS = 256


@dataclass(frozen=True)
class RecordName:
    """Which record of which batch: part `part` of `parts` of request `request_id` of an operator's channel."""

    channel: str
    seq: int
    request_id: int
    part: int
    parts: int
    sent_ns: int

    @classmethod
    def of(cls, header: RecordHeader) -> RecordName:
        """The name of a record of a channel."""
        return cls(header.channel, header.seq, header.request_id, header.part, header.parts, header.sent_ns)

    @property
    def key(self) -> tuple[str, int]:
        """Unique over the run; a channel's name may come back with another operator, its clock does not."""
        return f"{self.channel}/{self.seq}", self.sent_ns


@dataclass
class Counters:
    """Totals over the run, restarts included; see `run.Status`."""

    batches: int = 0
    experiences: int = 0
    duplicates: int = 0
    trained: int = 0
    scored: int = 0
    steps_skipped: int = 0
    loss: float | None = None
    first_loss: float | None = None
    auc: float | None = None
    first_auc: float | None = None


class Learner:
    """Replay buffer, schedule and running AUC around a `Trainer`.

    `draw_into` says, before each draw, in which memory it goes: that of the draw before it may be used again.

    Attributes:
        on_step: called with the experiences of each training step before it is taken.
        on_due: called with the number of steps that a batch brings, when they fall due.
    """

    def __init__(
        self, trainer: Trainer, replay: ReplayBuffer, settings: Settings, draw_into: Callable[[], Empty] | None = None
    ) -> None:
        self.trainer = trainer
        self.replay = replay
        self.counters = Counters()
        self.steps_due = 0
        self.on_step: Callable[[PackedBatch], object] = lambda _: None
        self.on_due: Callable[[int], object] = lambda _: None
        self._settings = settings
        self._draw_into = draw_into or (lambda: np.empty)
        self._passes = Passes(settings.schedule.epochs, settings.batch_size)
        self._window = RunningAuc()
        self._finished = 0
        self._batch_pairs: list[tuple[Array, Array]] = []
        self._open: dict[str, int] = {}
        self._recent: deque[tuple[str, int]] = deque(maxlen=_REMEMBERED_RECORDS)

    @property
    def batch_is_in(self) -> bool:
        """Whether a batch has come in whole since the last `close_batch`; its steps, if any, are due."""
        return self._finished > 0

    @property
    def may_train(self) -> bool:
        """Whether a step may be taken though none is due: `train: continuous`, within `max_replays`."""
        schedule, held = self._settings.schedule, len(self.replay)
        if schedule.train != "continuous" or held < self._settings.min_experiences:
            return False
        return self.replay.mean_draws < schedule.max_replays

    def knows(self, name: RecordName) -> bool:
        """Whether this very record was taken before: it is delivered again after a kill before its release."""
        return name.key in self._recent

    def evaluate(self, batch: PackedBatch) -> None:
        """Compare what the model predicts of a record, before it trains on it, with what came true."""
        pair = self.trainer.evaluate(batch)
        if pair is not None:
            self._window.add(*pair)
            self._batch_pairs.append(pair)
            self.counters.auc = self._window.value()

    def take(self, name: RecordName, batch: PackedBatch) -> int:
        """Copy a record's rows into the replay buffer; the number of rows that were new."""
        classes = self.trainer.classes(batch) if self._settings.replay.class_balance else None
        held = len(self.replay)
        added = self.replay.add(batch, classes)
        if self._passes and held + added > len(self.replay):
            self._forget_gone()
        self.counters.experiences += batch.num_rows
        self.counters.duplicates += batch.num_rows - added
        self._recent.append(name.key)
        if self._open.get(name.channel, name.request_id) != name.request_id:
            # The last part of the batch before it was dropped on the way: its steps are due all the same.
            self._finish_batch(name.channel)
        self._open[name.channel] = name.request_id
        if name.part == name.parts - 1:
            self._finish_batch(name.channel)
        return added

    def close_batch(self) -> float | None:
        """End the batch after its steps; the AUC on it before they were taken."""
        pairs, self._batch_pairs, self._finished = self._batch_pairs, [], 0
        auc = area_under_curve(*map(np.concatenate, zip(*pairs, strict=True))) if pairs else None
        if self.counters.first_auc is None:
            self.counters.first_auc = auc
        return auc

    def finish_open_batches(self) -> None:
        """Let the steps of batches fall due whose last part will not come any more."""
        for channel in list(self._open):
            self._finish_batch(channel)

    def train_step(self) -> float | None:
        """One step, the next that is due if any is; its loss, or None without a step: no experience is there for it."""
        planned = len(self._passes)
        self.steps_due = max(0, self.steps_due - 1)
        draw = self._draw()
        if self._settings.schedule.train == "epochs":
            # The plan skips steps whose experiences have left.
            self.steps_due = len(self._passes)
            self.counters.steps_skipped += planned - self.steps_due - bool(draw.rows.num_rows)
        if not draw.rows.num_rows:
            return None
        self.on_step(draw.rows)
        loss = self.trainer.train_step(draw.rows, draw.weights)
        if self.replay.settings.sampling == "priority":
            assert self.trainer.losses is not None
            self.replay.learnt(draw, self.trainer.losses)
        self.counters.trained += draw.rows.num_rows
        self.counters.loss = loss
        if self.counters.first_loss is None:
            self.counters.first_loss = loss
        return loss

    def skip(self, count: int) -> None:
        """Give up the `count` oldest steps that are due."""
        self.steps_due -= count
        self.counters.steps_skipped += count
        if self._settings.schedule.train == "epochs":
            self._passes.skip(count)

    def remove(self, eids: Collection[bytes]) -> PackedBatch:
        """Take experiences out of the replay buffer; with too few left no step is due any more."""
        removed = self.replay.remove(eids)
        if self._settings.schedule.train == "epochs":
            self._passes.keep_held(self.replay)
            self.steps_due = len(self._passes)
        if len(self.replay) < self._settings.min_experiences:
            self.steps_due = 0
        return removed

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Arrays and plain JSON values of everything beside the trainer's own state.

        Between two steps of a batch too; only the AUC of that very batch is then not told by the successor.
        """
        arrays, replay = self.replay.state()
        planned, passes = self._passes.state()
        return {**arrays, **planned}, {
            "counters": asdict(self.counters),
            "steps_due": self.steps_due,
            "finished_batches": self._finished,
            "open_batches": self._open,
            "recent_records": list(self._recent),
            "auc_window": self._window.state(),
            "replay": replay,
            "passes": passes,
        }

    def load_state(self, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.replay.load_state(arrays, state["replay"])
        self._passes.load_state(arrays, state["passes"])
        self.counters = Counters(**state["counters"])
        self.steps_due = state["steps_due"]
        self._finished = state["finished_batches"]
        self._open = dict(state["open_batches"])
        self._recent.extend((record, sent_ns) for record, sent_ns in state["recent_records"])
        self._window.load_state(state["auc_window"])

    def _finish_batch(self, channel: str) -> None:
        del self._open[channel]
        self.counters.batches += 1
        self._finished += 1
        schedule = self._settings.schedule
        if len(self.replay) < self._settings.min_experiences or self.counters.batches % schedule.train_every:
            return
        due = self.steps_due
        if schedule.train == "steps":
            self.steps_due += self._settings.steps_per_batch
        elif schedule.train == "epochs":
            self._passes.plan(self.replay)
            self.steps_due = len(self._passes)
        if self.steps_due > due:
            self.on_due(self.steps_due - due)

    def _forget_gone(self) -> None:
        """Count steps as skipped that waited for the pace until their experiences left the replay buffer."""
        planned = len(self._passes)
        self._passes.keep_held(self.replay)
        self.steps_due = len(self._passes)
        self.counters.steps_skipped += planned - self.steps_due

    def _draw(self) -> Draw:
        if self._settings.schedule.train == "epochs":
            return self._passes.draw(self.replay, self._draw_into())
        return self.replay.draw(self._settings.batch_size, self._draw_into())

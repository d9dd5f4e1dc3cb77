"""Train a task on a handful of experiences in this process: no run, no shared memory, the sidecar's own trainer.

batches > columns > nine tenths: replay buffer > training steps
                    one tenth, held out: what is predicted of it before and after
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mps_trainer.columns import Array, Column, PackedBatch
from mps_trainer.errors import ExperienceError
from mps_trainer.operator.extract import ExperienceLike
from mps_trainer.sidecar.auc import area_under_curve
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.tasks import AuxiliaryTask, wire_columns
from mps_trainer.workbench.columns_check import Extraction, extract


@dataclass(frozen=True)
class Learnt:
    """What training showed. Losses and times of each step, in order; times in milliseconds.

    Attributes:
        auc_before, auc: on the held-out experiences, untrained and at the end; None without `predictions`, or where
            only one outcome occurs.
        scores: (m,) of the held-out experiences, at the end.
    """

    trained_on: int
    held_out: int
    losses: list[float]
    step_ms: list[float]
    auc_before: float | None
    auc: float | None
    scores: Array
    trainer: Trainer

    @property
    def first_loss(self) -> float:
        """Mean of the first tenth of the steps."""
        return statistics.fmean(self.losses[: self._tenth])

    @property
    def last_loss(self) -> float:
        """Mean of the last tenth of the steps."""
        return statistics.fmean(self.losses[-self._tenth :])

    @property
    def _tenth(self) -> int:
        return max(1, len(self.losses) // 10)


def learn(
    task: AuxiliaryTask,
    batches: Sequence[Sequence[ExperienceLike]],
    *,
    steps: int = 200,
    batch_size: int = 256,
    seed: int = 0,
    device: str = "cpu",
) -> Learnt:
    """Train `task` for `steps` steps on batches of experiences, the last tenth held out. The same numbers every time.

    Raises:
        ExperienceError: no experience has what the task's columns ask for.
        TaskError: the task raised, or a loss or a score is not finite.
    """
    columns = wire_columns(task)
    return learn_from(Trainer(task, batch_size, seed, device), columns, extract(columns, batches), steps)


def learn_from(
    trainer: Trainer,
    columns: Sequence[Column],
    extraction: Extraction,
    steps: int,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Learnt:
    """The same for a trainer and rows that are there already; `tell` is called with each step."""
    if extraction.size < 2:
        raise ExperienceError(
            f"{extraction.size} of {extraction.seen} experiences can be used"
            + (f"; the first problem: {extraction.first_problem}" if extraction.first_problem else ""),
            "" if extraction.first_problem else "record more: two at the least, some hundreds to see anything",
        )
    trained, held = extraction.split()
    held_out = extraction.pack(columns, held)
    replay = ReplayBuffer(columns, len(trained), seed)
    replay.add(extraction.pack(columns, trained))
    before = _auc(trainer, held_out)
    losses, times = [], []
    for step in range(steps):
        batch = replay.sample(trainer.batch_size)
        tell(f"training step {step + 1} of {steps}")
        begin = time.perf_counter()
        losses.append(trainer.train_step(batch))
        times.append(1e3 * (time.perf_counter() - begin))
    return Learnt(
        trained_on=len(replay),
        held_out=len(held),
        losses=losses,
        step_ms=times,
        auc_before=before,
        auc=_auc(trainer, held_out),
        scores=np.asarray(trainer.score(held_out)),
        trainer=trainer,
    )


def _auc(trainer: Trainer, batch: PackedBatch) -> float | None:
    pair = trainer.evaluate(batch)
    return area_under_curve(*pair) if pair is not None else None

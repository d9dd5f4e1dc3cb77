"""The trainer: model, optimizer and the user's task. No files, no shared memory.

Every call into the user's code goes through `_users_code`, so that what goes wrong there is told with the step
and the ids of the experiences, and is never taken for a fault of the sidecar.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from mps_trainer.columns import Array, PackedBatch
from mps_trainer.config import ScheduleSettings, Settings
from mps_trainer.errors import ConfigError, GpuFaultError, MpsTrainerError, TaskError
from mps_trainer.run.doing import describe_ids
from mps_trainer.sidecar.gpu.faults import is_gpu_fault
from mps_trainer.sidecar.optimizer_state import check_saveable
from mps_trainer.sidecar.rate import rate_scheduler
from mps_trainer.tasks import AuxiliaryTask, TaskBatch
from mps_trainer.tasks.asking import check_tensor, parts_of, rows_of, to_numbers
from mps_trainer.tasks.random_state import random_state, seed_everything, set_random_state


class Trainer:
    """Trains and asks one model.

    Args:
        task: the user's.
        batch_size: the most experiences in one pass through the model, more are split; `rows_asked` is that of scoring.
        seed: of torch, numpy and Python, set just before the model is built.
        device: where the model lives.
        to_batch: how a packed batch gets there; None for a plain copy.
        schedule: how the learning rate changes; None: it stays.
        by_experience: train on the task's `losses`, weighted, instead of its `loss`.

    Attributes:
        losses: with `by_experience`, (n,) float32: those of the last training step.
        on_part: called before each pass of scoring and evaluating: a large record takes many.
        trained_ns: CLOCK_MONOTONIC when the model last took a step, or was built; what the age of its scores begins at.
    """

    def __init__(
        self,
        task: AuxiliaryTask,
        batch_size: int,
        seed: int,
        device: str = "cpu",
        to_batch: Callable[[PackedBatch], TaskBatch] | None = None,
        schedule: ScheduleSettings | None = None,
        *,
        by_experience: bool = False,
    ) -> None:
        self.task = task
        self.device = torch.device(device)
        self.batch_size = batch_size
        #: In one pass of `score` and `evaluate`; more than `batch_size` where that is known to fit.
        self.rows_asked = batch_size
        self._to_batch = to_batch or (lambda packed: TaskBatch.from_packed(packed, self.device))
        self._schedule = schedule or ScheduleSettings()
        self.by_experience = by_experience
        self.losses: Array | None = None
        self.step = 0
        self.trained_ns = time.monotonic_ns()
        self.on_part: Callable[[], object] = lambda: None
        # What the task has made once of the experiences scored last. Weak: a packed batch may hold a slot of the ring.
        self._scored: tuple[weakref.ref[PackedBatch], dict[str, Tensor]] | None = None
        seed_everything(seed)
        with self._users_code("build_model"):
            self.model = task.build_model().to(self.device)
        self._begin_optimizer()

    @property
    def learning_rate(self) -> float:
        """Of the next step, in the optimizer's first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def train_step(self, packed: PackedBatch, weights: Array | None = None) -> float:
        """One step on at most `batch_size` experiences; the loss. TaskError when it is not finite.

        Args:
            weights: (n,) float32, with `by_experience`: a factor on each experience's loss; None: 1.
        """
        self.model.train()
        self._scored = None
        with self._users_code("losses" if self.by_experience else "loss", packed):
            loss = self._loss(self._to_batch(packed), weights)
            # Reading the number waits for the device: never more than one step is in flight.
            value = float(loss.item())
        if not math.isfinite(value):
            raise self._error(f"the loss is {value}", packed, "look at these experiences, or lower learning_rate")
        with self._users_code("optimizer", packed):
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.synchronize()
        self.step += 1
        self.trained_ns = time.monotonic_ns()
        return value

    def score(self, packed: PackedBatch) -> Array:
        """(n,) float32: one score for each experience. TaskError when the shape is wrong or one is not finite."""
        scores = np.empty(packed.num_rows, np.float32)
        self._scored = None
        for start, part in parts_of(packed, self.rows_asked):
            self.on_part()
            with self._asking(), self._users_code("score", part):
                batch = self._to_batch(part)
                found = self.task.score(self.model, batch)
                scores[start : start + part.num_rows] = to_numbers("score", found, part.num_rows)
            if part is packed:
                self._scored = weakref.ref(packed), batch.made
            # The memory that was proven to be enough is that of one part.
            del batch, found
        if not np.isfinite(scores).all():
            bad = np.flatnonzero(~np.isfinite(scores))
            raise self._error(
                f"{len(bad)} of {len(scores)} scores are not finite",
                rows_of(packed, int(bad[0]), int(bad[0]) + 1),
                "make score() finite for every experience; the weights may have become NaN",
            )
        return scores

    def evaluate(self, packed: PackedBatch) -> tuple[Array, Array] | None:
        """What the model predicts of (n,) experiences and what came true, or None when the task has no such pair."""
        predicted, came_true = [], []
        made = self._made_of(packed)
        for _, part in parts_of(packed, self.rows_asked):
            self.on_part()
            with self._asking(), self._users_code("predictions", part):
                batch = self._to_batch(part)
                batch.made.update(made)
                pair = self.task.predictions(self.model, batch)
                if pair is None:
                    return None
                predicted.append(to_numbers("predictions", pair[0], part.num_rows))
                came_true.append(to_numbers("predictions", pair[1], part.num_rows))
            del batch, pair
        return (np.concatenate(predicted), np.concatenate(came_true)) if predicted else None

    def _made_of(self, packed: PackedBatch) -> dict[str, Tensor]:
        """What was made of these very experiences when they were scored; only of a batch that is one part."""
        scored, self._scored = self._scored, None
        return scored[1] if scored is not None and scored[0]() is packed else {}

    def classes(self, packed: PackedBatch) -> Array:
        """(n,) uint8: the class of each experience, found on the CPU."""
        with self._users_code("classes", packed):
            found = self.task.classes(TaskBatch.from_packed(packed, "cpu"))
            check_tensor("classes", found, (packed.num_rows,))
            values = np.asarray(found.numpy())
            if values.dtype.kind == "f" or (values.size and not 0 <= int(values.min()) <= int(values.max()) <= 255):
                raise ValueError("classes() must give bool or whole numbers from 0 to 255")
        return values.astype(np.uint8)

    def dry_step(self, packed: PackedBatch) -> None:
        """Train on, score and evaluate a made-up batch, then put everything back as it was.

        Whatever the task cannot do shows here, before READY, and the memory that it needs is taken. An optimizer
        that no checkpoint can hold is such a thing.
        """
        with self._users_code("build_model"):
            weights = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        random = random_state(self.device)
        self.train_step(packed)
        with self._users_code("optimizer"):
            check_saveable(self.optimizer)
        self.score(packed)
        self.evaluate(packed)
        self.model.load_state_dict(weights)
        self.model.zero_grad(set_to_none=True)
        self._begin_optimizer()
        self.step = 0
        # What the task counted of a batch that nobody sent.
        self.metrics()
        set_random_state(self.device, random)

    def metrics(self) -> dict[str, float]:
        """The finite ones of the task's own numbers since this was asked last. TaskError when one is no number."""
        with self._users_code("metrics"):
            found = {name: float(value) for name, value in self.task.metrics().items()}
        # JSON has no name for the others.
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def synchronize(self) -> None:
        """Wait until the device has nothing of ours to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _begin_optimizer(self) -> None:
        with self._users_code("optimizer"):
            self.optimizer = self.task.optimizer(self.model)
            self.scheduler = rate_scheduler(self.optimizer, self._schedule)

    def _loss(self, batch: TaskBatch, weights: Array | None) -> Tensor:
        if not self.by_experience:
            loss = self.task.loss(self.model, batch)
            check_tensor("loss", loss, ())
            return loss
        losses = self.task.losses(self.model, batch)
        self.losses = to_numbers("losses", losses.detach() if isinstance(losses, Tensor) else losses, batch.size)
        if weights is None:
            return losses.mean()
        return (losses * torch.from_numpy(weights).to(losses.device)).mean()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self.model.eval()
        # Asking must never change what training does next, even where a task draws numbers in score().
        random = random_state(self.device)
        try:
            with torch.inference_mode():
                yield
        finally:
            set_random_state(self.device, random)

    @contextmanager
    def _users_code(self, where: str, packed: PackedBatch | None = None) -> Iterator[None]:
        try:
            yield
        except MpsTrainerError:
            raise
        except torch.cuda.OutOfMemoryError as error:
            raise self._error(
                f"{where} ran out of memory: {error}", packed, "raise memory:, or lower batch_size or the maxima"
            ) from error
        # The sidecar handles its signals by itself, so even these come from the task: SystemExit would look like an end
        # that was asked for, and a panic of a Rust extension (pyo3) is no Exception either.
        except BaseException as error:
            if is_gpu_fault(error, self.device):
                raise GpuFaultError(self._words(f"{where} broke the GPU context: {error}", packed)) from error
            todo = f"correct {where} of the task; the traceback is in sidecar.log"
            raise self._error(f"{where} raised {type(error).__name__}: {error}", packed, todo) from error

    def _error(self, what: str, packed: PackedBatch | None, todo: str) -> TaskError:
        return TaskError(self._words(what, packed), todo)

    def _words(self, what: str, packed: PackedBatch | None) -> str:
        message = f"task {type(self.task).__name__}, step {self.step}: {what}"
        return message if packed is None else f"{message} ({describe_ids(_ids(packed))})"


def check_sampling(task: AuxiliaryTask, settings: Settings) -> None:
    """ConfigError when the replay buffer shall draw by losses that the task does not tell."""
    if settings.replay.sampling == "priority" and type(task).losses is AuxiliaryTask.losses:
        name = type(task).__name__
        raise ConfigError(
            f"replay.sampling is priority, but task {name} has no losses()",
            f"give {name} a method losses(model, batch) -> (B,) whose mean is its loss, or use sampling: recency",
        )


def make_trainer(
    task: AuxiliaryTask,
    settings: Settings,
    device: str = "cpu",
    to_batch: Callable[[PackedBatch], TaskBatch] | None = None,
) -> Trainer:
    """A trainer as a run's settings ask for."""
    by_experience = settings.replay.sampling == "priority"
    return Trainer(
        task, settings.batch_size, settings.seed, device, to_batch, settings.schedule, by_experience=by_experience
    )


def _ids(packed: PackedBatch) -> tuple[str, ...]:
    return tuple(packed["eid"].text(i) for i in range(packed.num_rows))

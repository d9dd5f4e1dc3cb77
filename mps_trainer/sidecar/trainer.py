"""The trainer: model, optimizer and the user's task. No files, no shared memory.

Every call into the user's code goes through `_users_code`, so that what goes wrong there is told with the step
and the ids of the experiences, and is never taken for a fault of the sidecar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mps_trainer.columns import Array, PackedBatch, PackedColumn
from mps_trainer.errors import GpuFaultError, MpsTrainerError, TaskError
from mps_trainer.run.doing import describe_ids
from mps_trainer.sidecar.gpu.faults import is_gpu_fault
from mps_trainer.sidecar.optimizer_state import check_saveable
from mps_trainer.tasks import AuxiliaryTask, TaskBatch


class Trainer:
    """Trains and asks one model.

    Args:
        task: the user's.
        batch_size: the most experiences in one pass through the model; more are split, never a larger allocation.
        seed: torch's seed, set just before the model is built.
        device: where the model lives.
        to_batch: how a packed batch gets there; None for a plain copy.

    Attributes:
        on_part: called before each pass of scoring and evaluating: a large record takes many.
    """

    def __init__(
        self,
        task: AuxiliaryTask,
        batch_size: int,
        seed: int,
        device: str = "cpu",
        to_batch: Callable[[PackedBatch], TaskBatch] | None = None,
    ) -> None:
        self.task = task
        self.device = torch.device(device)
        self.batch_size = batch_size
        self._to_batch = to_batch or (lambda packed: TaskBatch.from_packed(packed, self.device))
        self.step = 0
        self.on_part: Callable[[], object] = lambda: None
        torch.manual_seed(seed)
        with self._users_code("build_model"):
            self.model = task.build_model().to(self.device)
        with self._users_code("optimizer"):
            self.optimizer = task.optimizer(self.model)

    def train_step(self, packed: PackedBatch) -> float:
        """One step on at most `batch_size` experiences; the loss. TaskError when it is not finite."""
        self.model.train()
        with self._users_code("loss", packed):
            batch = self._to_batch(packed)
            loss = self.task.loss(self.model, batch)
            _check_tensor("loss", loss, ())
            # Reading the number waits for the device: never more than one step is in flight.
            value = float(loss.item())
        if not math.isfinite(value):
            raise self._error(f"the loss is {value}", packed, "look at these experiences, or lower learning_rate")
        with self._users_code("optimizer", packed):
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.synchronize()
        self.step += 1
        return value

    def score(self, packed: PackedBatch) -> Array:
        """(n,) float32: one score for each experience. TaskError when the shape is wrong or one is not finite."""
        scores = np.empty(packed.num_rows, np.float32)
        for start, part in _parts(packed, self.batch_size):
            self.on_part()
            with self._asking(), self._users_code("score", part):
                found = self.task.score(self.model, self._to_batch(part))
                scores[start : start + part.num_rows] = _to_numpy("score", found, part.num_rows)
        if not np.isfinite(scores).all():
            bad = np.flatnonzero(~np.isfinite(scores))
            raise self._error(
                f"{len(bad)} of {len(scores)} scores are not finite",
                _rows(packed, int(bad[0]), int(bad[0]) + 1),
                "make score() finite for every experience; the weights may have become NaN",
            )
        return scores

    def evaluate(self, packed: PackedBatch) -> tuple[Array, Array] | None:
        """What the model predicts of (n,) experiences and what came true, or None when the task has no such pair."""
        predicted, came_true = [], []
        for _, part in _parts(packed, self.batch_size):
            self.on_part()
            with self._asking(), self._users_code("predictions", part):
                pair = self.task.predictions(self.model, self._to_batch(part))
                if pair is None:
                    return None
                predicted.append(_to_numpy("predictions", pair[0], part.num_rows))
                came_true.append(_to_numpy("predictions", pair[1], part.num_rows))
        return (np.concatenate(predicted), np.concatenate(came_true)) if predicted else None

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
        self.optimizer = self.task.optimizer(self.model)
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


def random_state(device: torch.device) -> list[Tensor]:
    """Torch's random states: of the CPU and, for a GPU, of the device."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_random_state(device: torch.device, states: list[Tensor]) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _check_tensor(what: str, value: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(type(value))
        raise ValueError(f"{what}() gave {found}; it must give a tensor of shape {shape}")


def _to_numpy(what: str, value: Any, num_rows: int) -> Array:
    _check_tensor(what, value, (num_rows,))
    return np.asarray(value.float().cpu().numpy())


def _ids(packed: PackedBatch) -> tuple[str, ...]:
    return tuple(packed["eid"].text(i) for i in range(packed.num_rows))


def _parts(packed: PackedBatch, size: int) -> Iterator[tuple[int, PackedBatch]]:
    if packed.num_rows <= size:
        yield 0, packed
        return
    for start in range(0, packed.num_rows, size):
        yield start, _rows(packed, start, min(start + size, packed.num_rows))


def _rows(packed: PackedBatch, start: int, stop: int) -> PackedBatch:
    columns = {}
    for name, column in packed.columns.items():
        if column.offsets is None:
            columns[name] = PackedColumn(column.values[start:stop])
        else:
            offsets = column.offsets[start : stop + 1]
            values = column.values[offsets[0] : offsets[-1]]
            columns[name] = PackedColumn(values, offsets - offsets[0], column.is_text)
    return PackedBatch(columns, stop - start)

"""What a task must show in probation: training steps and scorings on worst, ragged and small batches.

steps (worst, ragged, small, again) > single experiences > the step's kernels > values larger than fair (warnings only)
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mps_trainer.columns import Column, PackedBatch
from mps_trainer.config import Settings
from mps_trainer.errors import MpsTrainerError, TaskError
from mps_trainer.sidecar.hard_batches import Stretch, hard_batch
from mps_trainer.sidecar.optimizer_state import check_saveable
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.worst_case import worst_case_batch
from mps_trainer.tasks import TaskBatch

_log = logging.getLogger(__name__)

STEPS = 20
#: A process that is killed in the middle of a longer kernel may take its neighbour along (docs/mps.md).
LONG_KERNEL_MS = 5.0
_SMALL_ROWS = 32
#: CUDA's own words for what breaks a context on the device and not in a call.
_FAULTS = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "hardware stack error",
    "unspecified launch failure",
)
_STRETCHES: tuple[Stretch, ...] = ("large numbers", "large whole numbers")


@dataclass
class TrialReport:
    """What was measured. Times in milliseconds, memory in bytes.

    Attributes:
        longest_step_ms: of all steps but the first, which loads kernels.
        longest_kernel: its name; "" on the CPU and where the profiler sees none.
        warnings: what is no failure, and what the user should know.
    """

    steps: int = 0
    step_ms: float = 0.0
    longest_step_ms: float = 0.0
    peak: int = 0
    longest_kernel: str = ""
    longest_kernel_ms: float = 0.0
    warnings: list[str] = field(default_factory=list)


class TaskTrial:
    """Tries one trainer's task; the model is of no use afterwards.

    Args:
        tell: called with what comes next, so that a crash can be told by what went before it.
        seconds: after these no step is begun, once every kind of batch had its turn.
    """

    def __init__(
        self,
        trainer: Trainer,
        columns: Sequence[Column],
        settings: Settings,
        tell: Callable[[str], None],
        seconds: float,
    ) -> None:
        self.report = TrialReport()
        self._trainer = trainer
        self._columns = columns
        self._batch_size = settings.batch_size
        # The fewest that the sidecar ever trains on, and few enough to be compared afterwards.
        self._small = min(settings.batch_size, max(settings.min_experiences, 1), _SMALL_ROWS)
        self._tell = tell
        self._seconds = seconds
        self._rng = np.random.default_rng(settings.seed)
        self._compares = False
        self._watch()

    def run(self) -> TrialReport:
        """The whole trial. TaskError says what the task cannot do."""
        before = [parameter.detach().cpu().clone() for parameter in self._trainer.model.parameters()]
        self._train()
        after = [parameter.detach().cpu() for parameter in self._trainer.model.parameters()]
        if all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
            raise self._error(
                f"no parameter changed in {self.report.steps} training steps",
                "let loss() depend on the parameters (no detach(), no no_grad()), and give the optimizer all of them",
            )
        check_saveable(self._trainer.optimizer)
        self._score_single_experiences()
        self._measure_kernels()
        if self._trainer.device.type == "cuda":
            self.report.peak = torch.cuda.max_memory_reserved(self._trainer.device)
        self._stretch()
        return self.report

    def _train(self) -> None:
        kinds = list(self._kinds())
        times = []
        began = time.monotonic()
        for i in range(STEPS):
            if i >= len(kinds) and time.monotonic() - began > self._seconds:
                break
            what, make = kinds[i % len(kinds)]
            batch = make()
            self._tell(f"training step {i + 1} of {STEPS}, {what}")
            started = time.perf_counter()
            self._trainer.train_step(batch)
            times.append(1e3 * (time.perf_counter() - started))
            self._tell(f"scoring after training step {i + 1}, {what}")
            self._ask(batch)
            self.report.steps += 1
        later = times[1:] or times
        self.report.step_ms, self.report.longest_step_ms = statistics.median(later), max(later)

    def _kinds(self) -> Iterator[tuple[str, Callable[[], PackedBatch]]]:
        small, rows = self._small, self._batch_size

        def compared() -> PackedBatch:
            self._compares = True
            return hard_batch(self._columns, small, self._rng)

        def whole() -> PackedBatch:
            self._compares = False
            return hard_batch(self._columns, rows, self._rng)

        def worst() -> PackedBatch:
            self._compares = False
            return worst_case_batch(self._columns, rows)

        yield f"{rows} experiences with every sequence at its maximum", worst
        yield f"{small} experiences with sequences of different lengths", compared
        yield f"{rows} experiences with sequences of different lengths", whole

    def _score_single_experiences(self) -> None:
        for length in (0, 1, max(column.maximum or 1 for column in self._columns)):
            self._tell(f"scoring one experience with sequences of length {length}")
            self._ask(hard_batch(self._columns, 1, self._rng, length=length))

    def _ask(self, batch: PackedBatch) -> None:
        self._trainer.score(batch)
        self._trainer.evaluate(batch)

    def _measure_kernels(self) -> None:
        if self._trainer.device.type != "cuda":
            return
        self._tell("a training step under the profiler")
        worst = worst_case_batch(self._columns, self._batch_size)
        self._compares = False
        name, milliseconds = longest_kernel(_profile(lambda: self._trainer.train_step(worst)))
        self.report.longest_kernel, self.report.longest_kernel_ms = name, milliseconds
        if milliseconds > LONG_KERNEL_MS:
            self.report.warnings.append(
                f"the kernel {name[:100]} takes {milliseconds:.1f} ms, more than {LONG_KERNEL_MS:.0f}: if the sidecar "
                "is killed from outside in the middle of it, the vLLM engine may fall too; a smaller batch_size helps"
            )

    def _stretch(self) -> None:
        """Values that a column may hold, or may not: only the user knows, so what fails here is a warning."""
        for stretch in _STRETCHES:
            self._tell(f"a batch with {stretch}")
            batch = hard_batch(self._columns, self._small, self._rng, stretch=stretch)
            try:
                self._ask(batch)
                self._trainer.train_step(batch)
            except MpsTrainerError as error:
                if is_uncontained_fault(str(error)):
                    raise
                found = error.message.partition(" (experiences")[0].splitlines()[0]
                self.report.warnings.append(f"with {stretch} in its columns: {found}; make sure that yours hold none")
                if "CUDA error" in str(error):
                    # After a device-side assert this process can ask its GPU nothing more.
                    return

    def _watch(self) -> None:
        task = self._trainer.task
        for name in ("loss", "losses", "score"):
            # On the object and past its class's own ideas of attributes: it keeps its type, which messages name.
            object.__setattr__(task, name, self._watched(name, getattr(task, name)))
        self._trainer.optimizer.register_step_pre_hook(self._check_gradients)

    def _watched(self, name: str, call: Callable[[nn.Module, TaskBatch], Any]) -> Callable[[nn.Module, TaskBatch], Any]:
        def watched(model: nn.Module, batch: TaskBatch) -> Any:
            before = _copy(batch) if self._compares else None
            found = call(model, batch)
            changed = _changed(before, batch) if before is not None else ""
            if changed:
                todo = "work on a copy: x = x.clone(), and no operators that end in _ on what the batch holds"
                raise self._error(f"{name}() changed the batch ({changed})", todo)
            if name == "score" and isinstance(found, Tensor) and not found.dtype.is_floating_point:
                raise self._error(f"score() gave {found.dtype}", "return floats: .float()")
            return found

        return watched

    def _check_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        names = {id(parameter): name for name, parameter in self._trainer.model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                    raise self._error(
                        f"the gradient of {names.get(id(parameter), 'a parameter')} is not finite, but the loss is",
                        "look for sqrt, log or a division at 0, whose value is finite and whose slope is not",
                    )

    def _error(self, found: str, todo: str) -> TaskError:
        return TaskError(f"task {type(self._trainer.task).__name__}, step {self._trainer.step}: {found}", todo)


def is_uncontained_fault(message: str) -> bool:
    """Whether a message tells of a fault that MPS does not contain; a device-side assert and refused calls are none."""
    return "CUDA error" in message and any(fault in message for fault in _FAULTS)


def longest_kernel(events: Iterable[Any]) -> tuple[str, float]:
    """Name and milliseconds of the longest kernel among a profiler's events; ("", 0.0) when there is none."""
    found = [
        (event.time_range.elapsed_us() / 1e3, str(event.name))
        for event in events
        if event.device_type == DeviceType.CUDA
        # The profiler repeats ranges of the user on the GPU's line, and copies are no kernels.
        and not getattr(event, "is_user_annotation", False)
        and not str(event.name).startswith(("Memcpy", "Memset", "Optimizer.", "ProfilerStep"))
    ]
    milliseconds, name = max(found, default=(0.0, ""))
    return name, milliseconds


def _profile(step: Callable[[], object]) -> list[Any]:
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        return list(profiler.events() or ())
    except MpsTrainerError:
        raise
    except (RuntimeError, AssertionError) as error:
        if "CUDA error" in str(error):
            raise
        _log.warning("the profiler does not work here (%s): no kernel was measured", error)
        return []


def _copy(batch: TaskBatch) -> dict[str, Any]:
    tensors = {f"{name}{part}": tensor.clone() for name, part, tensor in _parts(batch)}
    return {**tensors, **{name: list(rows) for name, rows in batch.texts.items()}}


def _parts(batch: TaskBatch) -> Iterator[tuple[str, str, Tensor]]:
    for name, value in batch.tensors.items():
        if isinstance(value, Tensor):
            yield name, "", value
        else:
            yield name, ".values", value.values
            yield name, ".offsets", value.offsets


def _changed(before: dict[str, Any], batch: TaskBatch) -> str:
    after: dict[str, Any] = {f"{name}{part}": tensor for name, part, tensor in _parts(batch)}
    after |= batch.texts
    if after.keys() != before.keys():
        return f"its columns are now {', '.join(after)}"
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        if not same:
            return f"column {name}"
    return ""

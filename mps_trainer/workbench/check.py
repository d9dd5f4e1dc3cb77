"""`mps-trainer check-task`: a task on its own, before any run, with what it costs.

probation's trial (worst, ragged and small batches: time, memory) > columns against the recording
> training with a held-out tenth > the time of scores > what to write into the YAML
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mps_trainer.columns import IDENTITY_COLUMNS, Column, PackedBatch
from mps_trainer.config import format_size, load_settings
from mps_trainer.errors import ConfigError, ExperienceError, MpsTrainerError, TaskError
from mps_trainer.mps.environment import without_mps
from mps_trainer.operator.recording import Recording, read_recording
from mps_trainer.sidecar.probation import explain, try_task
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.trial import TrialReport
from mps_trainer.sidecar.worst_case import worst_case_batch
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.workbench.columns_check import Extraction, check_sources, extract
from mps_trainer.workbench.learning import Learnt, learn_from
from mps_trainer.workbench.operations import count_operations

#: As many experiences as a batch of GRPO with 48 tasks of 16 runs; the latency that the docs speak of.
SCORED = 768
_SCORE_REPEATS = 5
_MIB = 2**20
#: What the plan takes when nothing is asked for: a quarter more than the step, and never less than this.
_SMALLEST_POOL = 256 * _MIB
_MEMORY_STEP = 256 * _MIB
_CHANCE = 0.55

Tell = Callable[[str], None]


@dataclass(frozen=True)
class CheckOptions:
    """What to check: the YAML's settings of the same names, and a recording."""

    task: str
    data: Path | None = None
    task_args: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    batch_size: int = 256
    steps: int = 200


@dataclass
class CheckReport:
    """What was found.

    Attributes:
        score_ms: for `SCORED` experiences.
        step_operations, score_operations: launched by a training step and by a scoring pass of a worst batch.
        learnt: None without a recording.
        memory: bytes to ask for in the YAML.
        warnings: what is no failure, and what the user should know.
    """

    device: str
    columns: tuple[Column, ...]
    trial: TrialReport
    score_ms: float = 0.0
    step_operations: int = 0
    score_operations: int = 0
    recording: Recording | None = None
    extraction: Extraction | None = None
    learnt: Learnt | None = None
    memory: int = _SMALLEST_POOL
    warnings: list[str] = field(default_factory=list)


def check_task(options: CheckOptions, tell: Tell = lambda _: None) -> CheckReport:
    """Check a task in this process; `tell` is called with each step of it.

    Changes this process: it leaves MPS, has one thread for tensors, and on the CPU a limit on its memory.

    Raises:
        ConfigError: a name, an argument or an option is wrong.
        ExperienceError: the recording lacks what the task asks for.
        PlacementError: the device cannot be had.
        TaskError: what the task cannot do, as the sidecar would say it.
    """
    if options.data is not None and not options.data.is_file():
        raise ConfigError(f"no such file: {options.data}", "record one: mps-trainer record trinity.yaml --to FILE")
    # What takes the process down leaves at least its stack.
    faulthandler.enable()
    leave_mps()
    _import_from_here()
    device = _device(options.device)
    try:
        return _check(options, device, tell)
    except (MpsTrainerError, MemoryError, RuntimeError) as error:
        if isinstance(error, MpsTrainerError) and not isinstance(error, TaskError):
            raise
        found, todo = explain(error)
        raise TaskError(found, _for_a_person_at_a_terminal(todo)) from error


def _for_a_person_at_a_terminal(todo: str) -> str:
    """The sidecar's advice where there is no log and no `memory:` yet."""
    for log in ("probation.log", "sidecar.log"):
        todo = todo.replace(f"see {log} in the run folder", f"the traceback is in {log}")
        todo = todo.replace(f"the traceback is in {log}", "`mps-trainer --debug check-task ...` shows the traceback")
        todo = todo.replace(f"the traceback in {log}", "the traceback of `mps-trainer --debug check-task ...`")
    return todo.replace("raise memory:, or lower", "lower")


def _check(options: CheckOptions, device: str, tell: Tell) -> CheckReport:
    settings = load_settings(
        {
            "task": options.task,
            "task_args": dict(options.task_args),
            "device": device,
            "batch_size": options.batch_size,
        }
    )
    trial = try_task(settings, device, tell)
    task = load_task(options.task, options.task_args)
    columns = wire_columns(task)
    report = CheckReport(device, columns, trial, memory=memory_to_ask_for(trial.peak))
    report.warnings += trial.warnings
    trainer = Trainer(task, options.batch_size, settings.seed, device)
    if options.data is None:
        report.warnings += check_sources(_own(columns), ())
        scored = worst_case_batch(columns, SCORED)
    else:
        tell(f"reading {options.data.name}")
        report.recording = read_recording(options.data)
        report.extraction = _extract(report, report.recording)
        report.learnt = learn_from(trainer, columns, report.extraction, options.steps, settings.seed, tell)
        report.warnings += learning_warnings(report.learnt)
        scored = report.extraction.pack(columns, np.arange(SCORED) % report.extraction.size)
    tell(f"scoring {SCORED} experiences")
    report.score_ms = _time_scores(trainer, scored)
    worst = worst_case_batch(columns, options.batch_size)
    tell("counting operations")
    report.score_operations = count_operations(lambda: trainer.score(worst))
    report.step_operations = count_operations(lambda: trainer.train_step(worst))
    return report


def _extract(report: CheckReport, recording: Recording) -> Extraction:
    experiences = [experience for batch in recording.batches for experience in batch]
    report.warnings += check_sources(_own(report.columns), experiences)
    found = extract(report.columns, recording.batches)
    if found.size == 0:
        raise ExperienceError(f"none of {found.seen} experiences can be used: {found.first_problem}")
    for column, count in found.problems.items():
        report.warnings.append(f"{count} of {found.seen} experiences lack column {column!r} and would not be fed")
    if found.first_problem:
        report.warnings.append(f"the first of them: {found.first_problem}".replace("\n", " "))
    if found.cut:
        report.warnings.append(f"{found.cut} sequences were cut to their column's maximum")
    if recording.broken:
        report.warnings.append(f"{recording.broken} lines of the file are no experience and were skipped")
    return found


def learning_warnings(learnt: Learnt) -> list[str]:
    """What looks wrong about how it learnt, one sentence each."""
    found = []
    if learnt.last_loss >= learnt.first_loss:
        found.append(
            f"the loss does not fall ({learnt.first_loss:.4g} first, {learnt.last_loss:.4g} last): try more --steps or "
            "another learning_rate, or the columns do not hold what the loss asks for"
        )
    if learnt.auc is not None and learnt.auc < _CHANCE:
        found.append(f"an AUC of {learnt.auc:.2f} on experiences that it has not seen is no better than chance")
    if len(learnt.scores) > 1 and float(np.ptp(learnt.scores)) == 0.0:
        found.append("all scores are equal, so a filter by score cannot choose")
    return found


def _time_scores(trainer: Trainer, batch: PackedBatch) -> float:
    times = []
    for _ in range(1 + _SCORE_REPEATS):
        begin = time.perf_counter()
        trainer.score(batch)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def memory_to_ask_for(peak: int) -> int:
    """Bytes for a task whose worst step takes `peak`: a quarter more, a multiple of 256 MiB and never less."""
    wanted = max(_SMALLEST_POOL, peak + peak // 4)
    return -(-wanted // _MEMORY_STEP) * _MEMORY_STEP


def memory_line(num_bytes: int) -> str:
    """The YAML's line for a number of bytes that is a multiple of 256 MiB: `memory: 1.25GiB`."""
    return f"memory: {num_bytes / 2**30:g}GiB"


def describe_column(column: Column) -> str:
    """One line: `tokens: response_tokens, int32, up to 4096`."""
    shape = {"vector": f", width {column.shape[0] if column.shape else ''}", "scalar": ""}.get(
        column.kind, f", {'the last' if column.keep == 'last' else 'up to'} {column.maximum}"
    )
    optional = "" if column.required else ", optional"
    return f"{column.name}: {column.source}, {column.dtype}{shape}{optional}, {format_size(column.max_row_bytes)}"


def _own(columns: tuple[Column, ...]) -> list[Column]:
    return [column for column in columns if column not in IDENTITY_COLUMNS]


def leave_mps() -> None:
    """Keep this process out of every daemon; only before CUDA is initialised.

    What breaks here must not break what shares a GPU.
    """
    env = without_mps(os.environ)
    for key in [key for key in os.environ if key not in env]:
        del os.environ[key]
    os.environ.update(env)


def _import_from_here() -> None:
    # The console script, unlike `python -m`, does not look for the user's module in the current folder.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda:0" if torch.cuda.is_available() else "cpu"

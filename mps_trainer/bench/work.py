"""What a trainer is given: which task, in which sizes, and made-up experiences of the rollout's lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mps_trainer.columns import Array, Column, Rows
from mps_trainer.config import Settings, load_settings
from mps_trainer.errors import ConfigError
from mps_trainer.transport import RingSettings

_PREBUILT = 4
_SLOT_ROOM = 64 * 1024


@dataclass(frozen=True)
class Work:
    """A task as the benchmark trains it.

    Attributes:
        rows: experiences in one record that reaches the trainer.
        batch_size: experiences in one training step.
        steps: training steps that fall due with each record.
        pool: bytes of the sidecar's reservation on a GPU.
    """

    name: str
    task: str
    task_args: dict[str, Any] = field(default_factory=dict)
    rows: int = 64
    batch_size: int = 256
    steps: int = 16
    pool: int = 2 * 2**30

    def settings(self, **more: Any) -> Settings:
        """The settings of a sidecar that trains it; never ends for idling, writes a checkpoint seldom."""
        return load_settings(
            {
                "task": self.task, "task_args": self.task_args, "batch_size": self.batch_size,
                "steps_per_batch": self.steps, "replay_capacity": max(2048, 2 * self.batch_size),
                "min_experiences": min(32, self.batch_size), "checkpoint_every": 10**6,
                "idle_timeout": "6h", "ready_timeout": "120s", "probation": "off",
            }
            | more
        )  # fmt: skip

    def ring(self, columns: Sequence[Column]) -> RingSettings:
        """Two slots: one in work and one that waits, so that a pause shows soon."""
        row = sum(column.max_row_bytes for column in columns)
        return RingSettings(num_slots=2, slot_bytes=-(-(row * self.rows + _SLOT_ROOM) // 4096) * 4096)


#: A and B are those of docs/benchmark.md; the rest are the built-in tasks.
WORKS = {
    work.name: work
    for work in (
        Work("A", "mps_trainer.bench.models:MlpClassifier"),
        Work("B", "mps_trainer.bench.models:RewardModel", rows=16, batch_size=16, steps=4, pool=8 * 2**30),
        Work("preference_classifier", "preference_classifier"),
        Work("token_outlier", "token_outlier"),
        Work("pass_rate", "pass_rate"),
    )
}


def find_work(name: str, task_args: dict[str, Any], steps: int | None = None, *, faster: int = 1) -> Work:
    """One of `WORKS` with the user's arguments; ConfigError names those that there are.

    Args:
        steps: for each record; None for the task's own, times `faster`. Few on a fast device would mean more records
            than any rollout has, and measure the journal's disk.
    """
    if name not in WORKS:
        raise ConfigError(f"there is no task {name!r} in the benchmark", f"use some of {', '.join(WORKS)}")
    work = WORKS[name]
    args = {**work.task_args, **task_args}
    return Work(name, work.task, args, work.rows, work.batch_size, steps or work.steps * faster, work.pool)


def made_up(columns: Sequence[Column], count: int, lengths: Sequence[int], prefix: str) -> Iterator[Rows]:
    """Records of `count` experiences without end: ids are new each time, the rest comes again.

    Args:
        lengths: of the rollout's responses; sequences get them in turn, cut to the column's maximum.
        prefix: of the ids, of this operator alone.
    """
    rng = np.random.default_rng(0)
    turn = itertools.cycle(lengths)
    built = []
    for _ in range(_PREBUILT):
        sizes = [next(turn) for _ in range(count)]
        own = [column for column in columns if column.name not in ("eid", "group")]
        built.append({column.name: _values(column, sizes, rng) for column in own})
    for number in itertools.count():
        ids = [f"{prefix}-{number}-{i}" for i in range(count)]
        yield {"eid": ids, "group": [f"{number}-{i // 8}" for i in range(count)], **built[number % _PREBUILT]}


def _values(column: Column, sizes: Sequence[int], rng: np.random.Generator) -> Array | list[Array] | list[str]:
    count, most = len(sizes), column.maximum or 0
    if column.kind == "text":
        return ["x" * min(size, most) for size in sizes]
    if column.kind == "ragged":
        return [_numbers(column, (min(size, most),), rng) for size in sizes]
    return _numbers(column, (count, column.width) if column.kind == "vector" else (count,), rng)


def _numbers(column: Column, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if np.dtype(column.dtype).kind == "f":
        return rng.random(shape, np.float32).astype(column.dtype)
    return rng.integers(0, 2 if column.dtype == "bool" else 100, shape).astype(column.dtype)

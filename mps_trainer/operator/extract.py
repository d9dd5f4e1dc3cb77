"""Experiences to rows: what the task's columns ask for, as numpy arrays.

consumes    a list of Trinity `Experience` objects (read only; nothing is changed)
produces    `Extracted`: rows for the transport, and which experiences could not be fed and why
waits for   nothing

A column's `source` is a field of the experience ("reward", "logprobs", "eid.uid"), a key of its info or metrics
("info.hidden_state"), "prompt_tokens", "response_tokens", or one of the two that look at the whole batch:
"batch.reward_mean" and "group.reward_mean" (a group is the experiences of one task, `eid.tid`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mps_trainer.columns import Array, Column, Rows
from mps_trainer.errors import ConfigError, ExperienceError


class ExperienceLike(Protocol):
    """The part of `trinity.common.experience.Experience` that is read here."""

    eid: Any
    tokens: Any
    prompt_length: int
    reward: float | None
    info: dict[str, Any]
    metrics: dict[str, Any]


@dataclass
class Extracted:
    """The rows of the experiences that can be fed.

    Attributes:
        rows: one entry a column, n rows each.
        fed: the n positions in the batch that the rows belong to, ascending.
        problems: column name -> how many experiences lack it.
        first_problem: the message about the first of them.
        cut: how many sequences were longer than their column's maximum.
    """

    rows: Rows
    fed: list[int]
    problems: dict[str, int] = field(default_factory=dict)
    first_problem: str = ""
    cut: int = 0


class Extractor:
    """Reads the declared columns out of a batch of experiences."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = tuple(columns)
        self._batch_columns = [c for c in columns if c.source in BATCH_SOURCES]
        self._readers = [(c, _reader(c.source)) for c in columns if c.source not in BATCH_SOURCES]

    def __call__(self, experiences: Sequence[ExperienceLike]) -> Extracted:
        """Extract a batch. An experience that lacks a required column is left out and counted, never an error."""
        out = Extracted(rows={}, fed=[])
        values: dict[str, list[Any]] = {column.name: [] for column in self._columns}
        batch_values = {c.name: BATCH_SOURCES[c.source](experiences) for c in self._batch_columns}
        for position, experience in enumerate(experiences):
            row = self._row(experience, position, batch_values, out)
            if row is not None:
                out.fed.append(position)
                for name, value in row.items():
                    values[name].append(value)
        out.rows = {column.name: _as_rows(column, values[column.name]) for column in self._columns}
        return out

    def _row(
        self, experience: ExperienceLike, position: int, batch_values: Mapping[str, list[float | None]], out: Extracted
    ) -> dict[str, Any] | None:
        row: dict[str, Any] = {}
        column = self._columns[0]
        num_cut = 0
        try:
            for column, read in self._readers:
                row[column.name], was_cut = _convert(column, read(experience), experience)
                num_cut += was_cut
            for column in self._batch_columns:
                row[column.name], _ = _convert(column, batch_values[column.name][position], experience)
        except (ExperienceError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            problem = error if isinstance(error, ExperienceError) else _unreadable(column, experience, error)
            out.problems[column.name] = out.problems.get(column.name, 0) + 1
            out.first_problem = out.first_problem or str(problem)
            return None
        out.cut += num_cut
        return row


def _reader(source: str) -> Callable[[ExperienceLike], Any]:
    if source == "response_tokens":
        return lambda experience: experience.tokens[experience.prompt_length :]
    if source == "prompt_tokens":
        return lambda experience: experience.tokens[: experience.prompt_length]
    head, _, key = source.partition(".")
    if head in ("info", "metrics") and key:
        return lambda experience: getattr(experience, head).get(key)
    if head == "eid" and key:
        return lambda experience: getattr(experience.eid, key)
    if key:
        raise ConfigError(
            f"a column has source {source!r}",
            "use a field of the experience, info.<key>, metrics.<key>, prompt_tokens, response_tokens, "
            + ", ".join(BATCH_SOURCES),
        )
    return lambda experience: getattr(experience, source)


def _convert(column: Column, value: Any, experience: ExperienceLike) -> tuple[Any, int]:
    """The value as the column wants it, and whether a sequence was cut."""
    if value is None:
        if column.required:
            raise ExperienceError(_missing(column, experience), "set it in your workflow, or change the task's columns")
        return _absent(column), 0
    if column.kind == "text":
        encoded = str(value).encode()
        return encoded[_kept(column, len(encoded))].decode(errors="ignore"), int(len(encoded) > (column.maximum or 0))
    if column.kind == "scalar":
        number = float(value) if column.dtype.startswith("float") else int(value)
        if not math.isfinite(number):
            raise _not_finite(column, experience)
        return number, 0
    array = np.ascontiguousarray(to_numpy(value), dtype=column.dtype).reshape(-1)
    # One NaN would make the loss NaN and end the sidecar: such an experience is better left out.
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise _not_finite(column, experience)
    if column.kind == "vector":
        if len(array) != column.width:
            raise ExperienceError(
                f"column {column.name!r} ({column.source}) of experience {_name(experience)} has width {len(array)}, "
                f"the task expects {column.width}",
                "set the width that your workflow stores in task_args (feature_dim for the built-in classifier)",
            )
        return array, 0
    return array[_kept(column, len(array))], int(len(array) > (column.maximum or 0))


def _kept(column: Column, length: int) -> slice:
    """What stays of a sequence of this length."""
    maximum = column.maximum or 0
    return slice(max(length - maximum, 0), None) if column.keep == "last" else slice(maximum)


def _not_finite(column: Column, experience: ExperienceLike) -> ExperienceError:
    return ExperienceError(
        f"column {column.name!r} ({column.source}) of experience {_name(experience)} holds NaN or infinity",
        "correct what your workflow stores there; experiences with such values are not fed",
    )


def _unreadable(column: Column, experience: ExperienceLike, error: Exception) -> ExperienceError:
    return ExperienceError(
        f"column {column.name!r} cannot be read from {column.source} of experience {_name(experience)} as "
        f"{column.dtype}{list(column.shape) or ''}: {type(error).__name__}: {error}",
        "correct the source or the dtype of the task's column, or what your workflow stores there",
    )


def _name(experience: ExperienceLike) -> str:
    return str(getattr(experience.eid, "uid", "without an id"))


def to_numpy(value: Any) -> Array:
    """A numpy array of a tensor, a list or an array. Torch is not imported for it.

    bfloat16 has no numpy type, so such a tensor goes through float32.
    """
    if hasattr(value, "detach"):
        value = value.detach()
        return np.asarray(value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy())
    return np.asarray(value)


def _absent(column: Column) -> Any:
    if column.kind == "text":
        return ""
    if column.kind == "scalar":
        # NaN and not 0: a missing reward must not look like a reward of zero.
        return float("nan") if column.dtype.startswith("float") else 0
    return np.zeros(column.width if column.kind == "vector" else 0, dtype=column.dtype)


def _missing(column: Column, experience: ExperienceLike) -> str:
    head = column.source.partition(".")[0]
    there = ""
    if head in ("info", "metrics"):
        keys = sorted(getattr(experience, head))
        there = f"; its {head} holds {', '.join(keys) or 'nothing'}"
    return f"experience {_name(experience)} has no {column.source} (column {column.name!r}){there}"


def _as_rows(column: Column, values: list[Any]) -> Array | list[Any]:
    if column.kind == "scalar":
        return np.asarray(values, dtype=column.dtype)
    return values


def _usable_reward(experience: ExperienceLike) -> float | None:
    """The reward as a finite number; None where there is none, so that one bad reward spoils no mean."""
    try:
        reward = float(experience.reward)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return reward if math.isfinite(reward) else None


def _batch_mean(experiences: Sequence[ExperienceLike]) -> list[float | None]:
    rewards = [_usable_reward(experience) for experience in experiences]
    known = [reward for reward in rewards if reward is not None]
    mean = sum(known) / len(known) if known else None
    return [None if reward is None else mean for reward in rewards]


def _group_mean(experiences: Sequence[ExperienceLike]) -> list[float | None]:
    rewards = [_usable_reward(experience) for experience in experiences]
    groups = [getattr(experience.eid, "tid", "") for experience in experiences]
    sums: dict[str, tuple[float, int]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        if reward is not None:
            total, count = sums.get(group, (0.0, 0))
            sums[group] = total + reward, count + 1
    return [
        None if reward is None else sums[group][0] / sums[group][1]
        for group, reward in zip(groups, rewards, strict=True)
    ]


BATCH_SOURCES: dict[str, Callable[[Sequence[ExperienceLike]], list[float | None]]] = {
    "batch.reward_mean": _batch_mean,
    "group.reward_mean": _group_mean,
}

"""Flags that can be read and make no sense: each is refused before anything starts."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from mps_trainer.bench.work import WORKS
from mps_trainer.errors import ConfigError

_AT_LEAST = {
    "rounds": 1, "batches": 1, "sequences": 1, "prompt_tokens": 1, "median_tokens": 1, "longest_tokens": 1, "warmup": 1,
    "tiny_width": 1, "tiny_layers": 1, "operator_cores": 1, "train_steps": 1, "closing": 0, "seed": 0, "gpu": 0,
}  # fmt: skip
#: The least, the most, and whether the least itself will do.
_BETWEEN = {
    "budget_s": (0.0, math.inf, False), "dedicated_s": (0.0, math.inf, True), "spread": (0.0, 10.0, True),
    "slowdown": (0.0, 1.0, False), "utilization": (0.0, 1.0, False),
}  # fmt: skip
_MOST = 10**9
#: Of a load: more would take minutes and gigabytes to make up, and years to run.
_MOST_ROLLOUTS = 10**6


def check(options: Namespace) -> None:
    """ConfigError with what was found and what is needed; every default is filled in."""
    for name, least in _AT_LEAST.items():
        value = getattr(options, name)
        # None: it depends on the task.
        if value is not None and not least <= value <= _MOST:
            raise ConfigError(f"{_flag(name)} is {value}", f"give a whole number from {least} to {_MOST}")
    for name, (low, high, with_low) in _BETWEEN.items():
        value = getattr(options, name)
        if not (math.isfinite(value) and (low <= value if with_low else low < value) and value <= high):
            from_low = "at least" if with_low else "above"
            most = f" and at most {high:g}" if math.isfinite(high) else ""
            raise ConfigError(f"{_flag(name)} is {value:g}", f"give a number {from_low} {low:g}{most}")
    _check_lists(options)
    _check_task_args(options.task_args, options.tasks)
    rollouts = options.rounds * options.batches * options.sequences
    if rollouts > _MOST_ROLLOUTS:
        raise ConfigError(
            f"--rounds, --batches and --sequences together ask for {rollouts:,} rollouts",
            f"give fewer: at most {_MOST_ROLLOUTS:,} are made up",
        )
    for flag, cores in (("--pin-engine", options.pin_engine), ("--pin-trainer", options.pin_trainer)):
        allowed = os.sched_getaffinity(0)
        if missing := sorted(set(cores) - allowed):
            raise ConfigError(f"{flag}: core {missing[0]} is not ours", f"name some of {_ranges(sorted(allowed))}")


def _check_lists(options: Namespace) -> None:
    if not options.tasks:
        raise ConfigError("--tasks names none", f"use some of {', '.join(WORKS)}")
    if not options.gap and options.trace is None:
        raise ConfigError("--gap names no share, and there is no --trace", "give shares such as 0,0.1,0.3")
    for name in ("tasks", "arms", "gap"):
        values: Sequence[Any] = getattr(options, name) or ()
        if twice := [value for value in values if values.count(value) > 1]:
            raise ConfigError(f"{_flag(name)} names {twice[0]} twice", "name each once")


def _check_task_args(found: Any, tasks: Sequence[str]) -> None:
    right = 'write the arguments by task: {"B": {"layers": 2}}'
    if not isinstance(found, dict):
        raise ConfigError(f"--task-args is {found!r}", right)
    for name, arguments in found.items():
        if name not in tasks:
            raise ConfigError(f"--task-args names {name!r}, and --tasks is {','.join(tasks)}", right)
        if not isinstance(arguments, dict):
            raise ConfigError(f"--task-args has {arguments!r} for {name}", right)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _ranges(cores: Sequence[int]) -> str:
    if len(cores) > 1 and cores[-1] - cores[0] == len(cores) - 1:
        return f"{cores[0]}-{cores[-1]}"
    return ",".join(map(str, cores))

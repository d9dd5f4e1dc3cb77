"""What the engine has to generate: batches of rollouts with a long tail, then a gap for the weight sync.

Every arm gets the same batches in the same order, so that their outputs can be compared.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mps_trainer.errors import ConfigError

#: Of a trace: with more the benchmark would wait for ever, for a number that somebody mistyped.
_MOST_S, _MOST_TOKENS = 3600.0, 10**7
_LIMITS = f"lengths are from 1 to {_MOST_TOKENS}, arrivals and gaps from 0 to {_MOST_S:g} s"


@dataclass(frozen=True)
class Request:
    """One rollout: when it arrives after the begin of its batch, and its lengths in tokens."""

    arrival_s: float
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class Batch:
    """Rollouts whose last token ends the batch.

    Attributes:
        seed: of prompts and sampling; the same batch has the same one in every arm.
        gap_s: recorded silence after it; None when the load's share of the cycle says it.
    """

    index: int
    seed: int
    requests: tuple[Request, ...]
    gap_s: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens that are generated."""
        return sum(request.response_tokens for request in self.requests)

    @property
    def arrives_at_once(self) -> bool:
        """Whether it does not depend on the clock which rollouts run side by side."""
        return all(request.arrival_s == 0 for request in self.requests)


@dataclass(frozen=True)
class Load:
    """Batches, and how long the engine is silent between them.

    Attributes:
        gap: share of the cycle (batch and gap, of the rollout alone) in which nothing is generated.
    """

    name: str
    batches: tuple[Batch, ...]
    gap: float = 0.0

    def batch(self, number: int) -> Batch:
        """The batch of this number; they come again from the start."""
        return self.batches[number % len(self.batches)]

    def gap_s(self, batch: Batch, alone_s: float) -> float:
        """Seconds of silence after `batch`; `alone_s`: what a batch takes without a trainer.

        A weight sync takes as long whatever the rollout took, so the gap is the same in every arm.
        """
        return batch.gap_s if batch.gap_s is not None else alone_s * self.gap / (1 - self.gap)


@dataclass(frozen=True)
class Shape:
    """Sizes of a made-up load, in tokens; response lengths are log-normal around `median`."""

    sequences: int
    prompt: int
    median: int
    spread: float
    longest: int


def long_tailed(shape: Shape, count: int, gap: float, seed: int = 0) -> Load:
    """`count` made-up batches. Every one has a response of the longest kind: the tail that a batch waits for."""
    if not 0 <= gap < 0.95:
        raise ConfigError(f"a gap of {gap:g} of the cycle", "give shares from 0 to below 0.95, such as 0,0.1,0.3")
    rng = np.random.default_rng(seed)
    batches = []
    for index in range(count):
        drawn = shape.median * np.exp(shape.spread * rng.standard_normal(shape.sequences))
        lengths = np.clip(drawn.round(), 1, shape.longest).astype(int)
        lengths[rng.integers(shape.sequences)] = shape.longest
        requests = tuple(Request(0.0, shape.prompt, int(length)) for length in lengths)
        batches.append(Batch(index, seed * 1000 + index, requests))
    return Load(f"gap {100 * gap:g} %", tuple(batches), gap)


def read_trace(path: Path) -> Load:
    """A recorded load: JSON lines of {"batch", "arrival_s", "prompt_tokens", "response_tokens", "gap_s"}.

    `arrival_s` counts from the begin of the batch; `gap_s`, on any line of a batch, is the silence after it. A file of
    `mps-trainer record` will do too: it holds the lengths of a real run, and no times.
    """
    batches: dict[int, list[Request]] = {}
    gaps: dict[int, float] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            batch, request = int(row["batch"]), _request(row)
            gaps[batch] = _longer(gaps.get(batch, 0.0), float(row.get("gap_s", 0.0)))
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            raise ConfigError(
                f"{path}, line {number} is no rollout of a trace: {error}",
                'write lines like {"batch": 0, "arrival_s": 0.0, "prompt_tokens": 128, "response_tokens": 311}',
            ) from None
        lengths = (request.prompt_tokens, request.response_tokens)
        # A NaN is in no range.
        if not (all(0 < some <= _MOST_TOKENS for some in lengths) and 0 <= request.arrival_s <= _MOST_S):
            raise ConfigError(f"{path}, line {number}: {request}", _LIMITS)
        if not gaps[batch] <= _MOST_S:
            raise ConfigError(f"{path}, line {number}: a gap of {gaps[batch]:g} s", _LIMITS)
        batches.setdefault(batch, []).append(request)
    if not batches:
        raise ConfigError(f"{path} holds no rollout", "record one, or leave --trace out")
    return Load(
        f"trace {path.name}",
        tuple(Batch(i, 7000 + i, tuple(batches[key]), gaps[key]) for i, key in enumerate(sorted(batches))),
    )


def _longer(one: float, other: float) -> float:
    return math.nan if math.isnan(other) else max(one, other)


def _request(row: dict[str, Any]) -> Request:
    if "tokens" in row:
        prompt = int(row["prompt_length"])
        return Request(0.0, prompt, len(row["tokens"]) - prompt)
    return Request(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["response_tokens"]))


def write_trace(load: Load, path: Path) -> None:
    """A load as a file that `read_trace` reads."""
    lines = [
        json.dumps(
            {
                "batch": batch.index, "arrival_s": request.arrival_s, "prompt_tokens": request.prompt_tokens,
                "response_tokens": request.response_tokens, "gap_s": batch.gap_s or 0.0,
            }
        )
        for batch in load.batches
        for request in batch.requests
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")

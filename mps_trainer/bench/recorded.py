"""A trace for the benchmark from what an engine noted of a real run (`vllm_plugin/load_recorder.py`)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.bench.load import Batch, Load, Request
from mps_trainer.errors import ConfigError


@dataclass(frozen=True)
class Served:
    """A request of a real run: when it came and was done, in seconds on the engine's clock, and its lengths."""

    arrival_s: float
    end_s: float
    prompt_tokens: int
    response_tokens: int


def read_requests(paths: Iterable[Path]) -> list[Served]:
    """The requests of an engine's files, by arrival. ConfigError names a line that is none."""
    found = [
        _served(path, number, line)
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
    ]  # fmt: skip
    if not found:
        raise ConfigError("no request was recorded", "set MPS_TRAINER_RECORD_LOAD where the engine starts")
    return sorted(found, key=lambda one: one.arrival_s)


def _served(path: Path, number: int, line: str) -> Served:
    try:
        found = Served(**json.loads(line))
        if not (math.isfinite(found.arrival_s) and found.arrival_s <= found.end_s < math.inf):
            raise ValueError(f"from {found.arrival_s} s to {found.end_s} s")
        if min(int(found.prompt_tokens), int(found.response_tokens)) < 0:
            raise ValueError(f"{found.prompt_tokens} and {found.response_tokens} tokens")
        return found
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"{path}, line {number} is no request of an engine: {error}",
            "give files that MPS_TRAINER_RECORD_LOAD wrote; the last line may be cut: delete it",
        ) from None


def to_load(requests: list[Served], name: str, quiet_s: float = 0.5) -> Load:
    """Batches of rollouts: one begins when a request comes after `quiet_s` without any in the engine.

    The silence after a batch is its gap. The last batch of a run has none, and what came before is kept.
    """
    batches: list[list[Served]] = []
    busy_until = float("-inf")
    for request in requests:
        if request.arrival_s - busy_until >= quiet_s:
            batches.append([])
        batches[-1].append(request)
        busy_until = max(busy_until, request.end_s)
    ends = [max(one.end_s for one in batch) for batch in batches]
    begins = [batch[0].arrival_s for batch in batches]
    gaps = [begins[i + 1] - ends[i] if i + 1 < len(batches) else 0.0 for i in range(len(batches))]
    return Load(
        name,
        tuple(
            Batch(
                index,
                7000 + index,
                tuple(
                    Request(round(one.arrival_s - begin, 4), max(1, one.prompt_tokens), max(1, one.response_tokens))
                    for one in batch
                ),
                round(gap, 4),
            )
            for index, (batch, begin, gap) in enumerate(zip(batches, begins, gaps, strict=True))
        ),
    )

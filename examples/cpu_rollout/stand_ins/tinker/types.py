"""Stand-in for tinker.types: the fields that trinity-rft 0.6 reads or fills."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelInput:
    tokens: list[int]

    @classmethod
    def from_ints(cls, tokens: list[int]) -> ModelInput:
        return cls(list(tokens))

    def to_ints(self) -> list[int]:
        return self.tokens


@dataclass
class Datum:
    model_input: ModelInput
    loss_fn_inputs: dict[str, Any]


@dataclass
class AdamParams:
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass
class SampledSequence:
    stop_reason: str
    tokens: list[int]
    logprobs: list[float]


@dataclass
class SampleResponse:
    sequences: list[SampledSequence]


@dataclass
class Result:
    """What a finished remote call answers: metrics of a step, or the path of a checkpoint."""

    metrics: dict[str, float] = field(default_factory=dict)
    path: str = ""

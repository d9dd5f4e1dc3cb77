"""Rewards that follow a known rule over the response's tokens, drawn at random from a seed.

An auxiliary model that learns from the stream can thus be checked against the truth.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

#: Beside the model's weights: responses of that very model, for balancing a rule.
SAMPLES_FILE = "sample_responses.json"

Kind = Literal["share", "order"]


@dataclass(frozen=True)
class RuleSettings:
    """What `workflow_args.rule` of the YAML may say.

    Attributes:
        seed: draws the members (a random half of the vocabulary), the flips and the shuffle.
        kind: share: reward 1 if members make up more of the response than the median response has.
            order: reward 1 if members stand, on average, earlier in the response than the others; how many there
            are says nothing about it, so statistics of a bag of tokens cannot see it.
        noise: share of rewards that are flipped, the planted outliers.
        shuffle: rewards are coin tosses, independent of the tokens; nothing is planted then.
    """

    seed: int = 0
    kind: Kind = "share"
    noise: float = 0.0
    shuffle: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("share", "order"):
            raise ValueError(f"rule.kind is {self.kind!r}; use share or order")
        if not 0.0 <= self.noise < 0.5:
            raise ValueError(f"rule.noise is {self.noise}; use a share from 0 to below 0.5")


class TokenRule:
    """The rule itself: token ids in, True or False out. Deterministic in its seed."""

    def __init__(self, settings: RuleSettings, vocab_size: int, calibration: list[list[int]]) -> None:
        self.settings = settings
        rng = random.Random(settings.seed)
        self.members = np.zeros(vocab_size, dtype=bool)
        self.members[rng.sample(range(vocab_size), vocab_size // 2)] = True
        # The median over responses of this very model balances the classes, whatever set was drawn.
        self.threshold = 0.0 if settings.kind == "order" else float(np.median([*map(self.score, calibration)]))

    def score(self, tokens: list[int]) -> float:
        """What the rule compares with its threshold, for the response's token ids."""
        member = self.members[np.asarray(tokens)]
        if self.settings.kind == "share":
            return float(member.mean())
        positions = np.arange(len(tokens))
        if member.all() or not member.any():
            return 0.0
        return float(positions[~member].mean() - positions[member].mean())

    def holds(self, tokens: list[int]) -> bool:
        """Whether a response (token ids, without the closing EOS) gets reward 1 before noise."""
        if not tokens:
            return False
        score = self.score(tokens)
        if self.settings.kind == "order" and score == self.threshold:
            # A tie says something about the bag of tokens (too few members); a coin keeps it out of the reward.
            return random.Random(repr(tokens)).random() < 0.5
        return score > self.threshold


@dataclass(frozen=True)
class Verdict:
    """The reward of one response, and what was done to it."""

    reward: float
    planted: int


def judge(rule: TokenRule, tokens: list[int], key: str) -> Verdict:
    """The reward of a response, its noise drawn from `key` (which experience it is), so that reruns agree."""
    rng = random.Random(f"{rule.settings.seed}/{key}")
    flip = rng.random() < rule.settings.noise
    if rule.settings.shuffle:
        return Verdict(float(rng.random() < 0.5), 0)
    return Verdict(float(rule.holds(tokens) != flip), int(flip))


@lru_cache(maxsize=8)
def load_rule(settings: RuleSettings, model_path: str) -> TokenRule:
    """The rule for the model in `model_path`; cached, because a workflow is made for every task."""
    folder = Path(model_path)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return TokenRule(settings, vocab_size, json.loads((folder / SAMPLES_FILE).read_text()))


@lru_cache(maxsize=8)
def end_of_turn_id(model_path: str) -> int:
    """The token that ends a response of the model in `model_path`."""
    return int(json.loads((Path(model_path) / "config.json").read_text())["eos_token_id"])

"""Synthetic experiences whose reward follows a random rule over the response's tokens."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from mps_trainer.columns import PackedBatch, PackedColumn

VOCABULARY = 320
LENGTH = 48


def pack_text(texts: list[str]) -> PackedColumn:
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    return PackedColumn(np.frombuffer(b"".join(encoded), np.uint8), offsets, is_text=True)


def pack_ragged(rows: list[np.ndarray[Any, Any]]) -> PackedColumn:
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return PackedColumn(np.concatenate(rows), offsets)


class TokenStream:
    """Batches for `PreferenceClassifier` without features; `kind` says what the reward depends on."""

    def __init__(self, seed: int, kind: Literal["share", "order", "shuffle"] = "share", noise: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        frequency = 1 / np.arange(1, VOCABULARY + 1)
        self.frequency = self.rng.permutation(frequency / frequency.sum())
        self.members = np.zeros(VOCABULARY, bool)
        self.members[self.rng.permutation(VOCABULARY)[: VOCABULARY // 2]] = True
        self.kind, self.noise = kind, noise
        self.median = float(np.median(self._statistic(self._tokens(4000))))
        self.sent = 0

    def batch(self, size: int) -> PackedBatch:
        tokens = self._tokens(size)
        rewards = self._statistic(tokens) > self.median
        flipped = self.rng.random(size) < self.noise
        rewards = np.where(flipped, ~rewards, rewards).astype(np.float32)
        self.flipped = flipped
        names = [f"e{self.sent + i}" for i in range(size)]
        self.sent += size
        logprobs = np.log(self.frequency[tokens]).astype(np.float32)
        columns = {
            "eid": pack_text(names),
            "group": pack_text([f"t{i // 8}" for i in range(size)]),
            "reward": PackedColumn(rewards),
            "outcome": PackedColumn(rewards),
            "baseline": PackedColumn(np.full(size, rewards.mean(), np.float32)),
            "tokens": pack_ragged(list(tokens.astype(np.int32))),
            "logprobs": pack_ragged(list(logprobs)),
        }
        return PackedBatch(columns, size)

    def _tokens(self, size: int) -> np.ndarray[Any, Any]:
        return self.rng.choice(VOCABULARY, (size, LENGTH), p=self.frequency)

    def _statistic(self, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        inside = self.members[tokens]
        if self.kind == "share":
            return inside.mean(1)
        if self.kind == "shuffle":
            return self.rng.random(len(tokens))
        # The mean position of the members against that of the others: a bag holds nothing of it.
        place = np.arange(LENGTH)
        count = inside.sum(1).clip(1, LENGTH - 1)
        return (inside * place).sum(1) / count - (~inside * place).sum(1) / (LENGTH - count)

"""The built-in task: does an experience earn more reward than its baseline?

The network reads a feature vector that the workflow left in `experience.info`, or, with no `feature_dim`,
statistics of the response: the share of its tokens in each of `num_buckets` hash buckets, mean, minimum and
standard deviation of its logprobs, and the logarithm of its length.

What statistics of a bag cannot see: the order of the tokens. Two responses that are permutations of each other
get the same score, so a preference that depends on order alone is learnt by chance at best (AUC 0.5). Two tokens
that share a bucket cannot be told apart either: keep `num_buckets` well above the number of tokens in common use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from mps_trainer.columns import Column
from mps_trainer.errors import ConfigError
from mps_trainer.tasks.base import AuxiliaryTask
from mps_trainer.tasks.batch import TaskBatch
from mps_trainer.tasks.token_features import NUM_STATISTICS, histogram, statistics

_BASELINES = {"batch_mean": "batch.reward_mean", "group_mean": "group.reward_mean"}


class PreferenceNetwork(nn.Module):
    """(B, D) float -> (B,) logits: a linear path, which learns fast, plus an MLP for what is not linear."""

    def __init__(self, width: int, hidden_size: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        layers: list[nn.Module] = []
        for size_in in [width, *[hidden_size] * (depth - 1)][:depth]:
            layers += [nn.Linear(size_in, hidden_size), nn.ReLU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden_size if depth else width, 1))

    def forward(self, features: Tensor) -> Tensor:
        """Logits of shape (B,)."""
        linear: Tensor = self.linear(features)
        curved: Tensor = self.mlp(features)
        return (linear + curved).squeeze(-1)


class PreferenceClassifier(AuxiliaryTask):
    """Binary cross-entropy on "reward > baseline"; the score of an experience is how far it is an outlier.

    Args:
        feature: the key of `experience.info` that holds the feature vector; read when `feature_dim` is set.
        feature_dim: the vector's width; None for statistics of the response.
        label: the baseline: the mean reward of the batch, of the experiences of the same task, or a number. Who only
            equals it is not better: with group_mean all experiences of a task that was always solved count as 0.
        score: outlier: |label - p|, how strongly the outcome contradicts the model; preference: p itself.
        hidden_size, depth, dropout: the MLP; depth 0 leaves a logistic regression.
        learning_rate, weight_decay: of AdamW.
        num_buckets: hash buckets of the token histogram.
        max_tokens: the longest response that is read; longer ones are cut.
    """

    def __init__(
        self,
        feature: str = "hidden_state",
        feature_dim: int | None = None,
        label: Literal["batch_mean", "group_mean"] | float = "batch_mean",
        score: Literal["outlier", "preference"] = "outlier",
        hidden_size: int = 256,
        depth: int = 2,
        dropout: float = 0.1,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        num_buckets: int = 1024,
        max_tokens: int = 4096,
    ) -> None:
        if label not in _BASELINES and isinstance(label, (str, bool)):
            raise ConfigError(f"task_args.label is {label!r}", "use batch_mean, group_mean or a number")
        if score not in ("outlier", "preference"):
            raise ConfigError(f"task_args.score is {score!r}", "use outlier or preference")
        sizes = {"feature_dim": feature_dim, "hidden_size": hidden_size, "num_buckets": num_buckets}
        for key, size in {**sizes, "max_tokens": max_tokens, "depth": depth + 1}.items():
            if size is not None and (not isinstance(size, int) or size < 1):
                raise ConfigError(f"task_args.{key} is {size!r}", "use a whole number that is large enough")
        self.feature, self.feature_dim, self.max_tokens = feature, feature_dim, max_tokens
        self.label, self.score_kind = label, score
        self.hidden_size, self.depth, self.dropout, self.num_buckets = hidden_size, depth, dropout, num_buckets
        self.learning_rate, self.weight_decay = learning_rate, weight_decay

    def columns(self) -> Sequence[Column]:
        """The feature vector, or tokens and logprobs of the response; the reward and its baseline."""
        columns = [Column(name="outcome", source="reward")]
        if isinstance(self.label, str):
            columns.append(Column(name="baseline", source=_BASELINES[self.label]))
        if self.feature_dim is not None:
            return [*columns, Column(name="features", source=f"info.{self.feature}", shape=(self.feature_dim,))]
        sequence = {"shape": (None,), "maximum": self.max_tokens}
        return [
            *columns,
            Column(name="tokens", source="response_tokens", dtype="int32", **sequence),  # type: ignore[arg-type]
            Column(name="logprobs", source="logprobs", required=False, **sequence),  # type: ignore[arg-type]
        ]

    def build_model(self) -> nn.Module:
        """The network on the CPU."""
        width = self.feature_dim or self.num_buckets + NUM_STATISTICS
        return PreferenceNetwork(width, self.hidden_size, self.depth, self.dropout)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """Mean binary cross-entropy."""
        return self.losses(model, batch).mean()

    def losses(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """(B,) binary cross-entropy, in nats."""
        logits: Tensor = model(self._features(batch))
        return binary_cross_entropy_with_logits(logits, self._labels(batch), reduction="none")

    def classes(self, batch: TaskBatch) -> Tensor:
        """(B,) bool: whether it was better than its baseline."""
        return self._labels(batch).bool()

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """(B,) in [0, 1]."""
        preference = torch.sigmoid(model(self._features(batch)))
        return preference if self.score_kind == "preference" else (self._labels(batch) - preference).abs()

    def predictions(self, model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """(B,) probability of "better than the baseline", and (B,) whether it was."""
        return torch.sigmoid(model(self._features(batch))), self._labels(batch)

    def _labels(self, batch: TaskBatch) -> Tensor:
        baseline = batch["baseline"] if isinstance(self.label, str) else float(self.label)
        return (batch["outcome"] > baseline).float()

    def _features(self, batch: TaskBatch) -> Tensor:
        return batch.once("features", lambda: self._make_features(batch))

    def _make_features(self, batch: TaskBatch) -> Tensor:
        if self.feature_dim is not None:
            # Hidden states differ in scale by orders of magnitude from model to model.
            return nn.functional.layer_norm(batch["features"].float(), (self.feature_dim,))
        tokens = batch.ragged("tokens")
        return torch.cat(
            [histogram(tokens, self.num_buckets), statistics(batch.ragged("logprobs"), tokens.lengths)], dim=1
        )

"""The built-in task `pass_rate`: how hard is this task for the policy as it is now?

A network reads the prompt alone and predicts the chance that a run of it earns more than `pass_reward`; the runs of a
task are so many tosses of that coin (binary cross-entropy, the negative log-likelihood of a Bernoulli variable). The
score says which tasks teach little: group-normalised advantages vanish where all runs pass or all fail, and their
variance is p (1 - p), so `uninformative` is 1 - 4 p (1 - p): 0 for even odds, 1 for a sure thing (compare the dynamic
sampling of DAPO, arXiv:2503.14476, section 3.2, which drops such groups after rolling them out).
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
from mps_trainer.tasks.preference_classifier import PreferenceNetwork
from mps_trainer.tasks.token_features import histogram


class PassRate(AuxiliaryTask):
    """Predicts the pass rate of a task from its prompt.

    Args:
        pass_reward: a run passes when its reward is above this.
        score: uninformative: 1 - 4 p (1 - p); difficulty: 1 - p; pass_rate: p itself.
        max_tokens: the longest prompt that is read; longer ones are cut.
        num_buckets: hash buckets of the token histogram.
        hidden_size, depth, dropout: the MLP; depth 0 leaves a logistic regression.
        learning_rate, weight_decay: of AdamW.
    """

    def __init__(
        self,
        pass_reward: float = 0.5,
        score: Literal["uninformative", "difficulty", "pass_rate"] = "uninformative",
        max_tokens: int = 2048,
        num_buckets: int = 1024,
        hidden_size: int = 128,
        depth: int = 1,
        dropout: float = 0.1,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
    ) -> None:
        if score not in ("uninformative", "difficulty", "pass_rate"):
            raise ConfigError(f"task_args.score is {score!r}", "use uninformative, difficulty or pass_rate")
        sizes = {"max_tokens": max_tokens, "num_buckets": num_buckets, "hidden_size": hidden_size, "depth": depth + 1}
        for key, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"task_args.{key} is {size!r}", "use a whole number that is large enough")
        self.pass_reward, self.score_kind = float(pass_reward), score
        self.max_tokens, self.num_buckets = max_tokens, num_buckets
        self.hidden_size, self.depth, self.dropout = hidden_size, depth, dropout
        self.learning_rate, self.weight_decay = learning_rate, weight_decay

    def columns(self) -> Sequence[Column]:
        """The prompt's tokens; the reward travels anyway."""
        return [
            Column(name="prompt", source="prompt_tokens", dtype="int32", shape=(None,), maximum=self.max_tokens),
            Column(name="outcome", source="reward"),
        ]

    def build_model(self) -> nn.Module:
        """The network on the CPU."""
        return PreferenceNetwork(self.num_buckets, self.hidden_size, self.depth, self.dropout)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """Mean binary cross-entropy, in nats."""
        return self.losses(model, batch).mean()

    def losses(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """(B,) binary cross-entropy, in nats."""
        return binary_cross_entropy_with_logits(self._logits(model, batch), self._passed(batch), reduction="none")

    def classes(self, batch: TaskBatch) -> Tensor:
        """(B,) bool: whether the run passed."""
        return self._passed(batch).bool()

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """(B,) in [0, 1]; the same for all runs of a task."""
        rate = torch.sigmoid(self._logits(model, batch))
        if self.score_kind == "difficulty":
            return 1 - rate
        return rate if self.score_kind == "pass_rate" else 1 - 4 * rate * (1 - rate)

    def predictions(self, model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """(B,) the predicted pass rate, and (B,) whether the run passed."""
        return torch.sigmoid(self._logits(model, batch)), self._passed(batch)

    def _logits(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        features = batch.once("features", lambda: histogram(batch.ragged("prompt"), self.num_buckets))
        logits: Tensor = model(features)
        return logits

    def _passed(self, batch: TaskBatch) -> Tensor:
        return (batch["outcome"] > self.pass_reward).float()

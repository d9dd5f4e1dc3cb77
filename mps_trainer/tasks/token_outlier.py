"""The built-in task `token_outlier`: how unusual is this response among the others? It needs no features, no reward.

Eleven statistics of a response (its logprobs, its length, how it repeats itself, how its tokens spread) are
standardised with running means, and a Gaussian with a full covariance is fitted to them by gradient descent on the
negative log-likelihood. The score is that negative log-likelihood, per statistic: with mean m and precision L L^T,

    score(x) = (|L^T (x - m)|^2 / 2 - sum(log diag L) + D/2 log(2 pi)) / D

(Bishop, Pattern Recognition and Machine Learning, 2.3; the first term is half the squared Mahalanobis distance).
Outliers would widen the very measure that shall find them, so each step leaves out the `contamination` share with
the highest scores (the idea of Rousseeuw's minimum covariance determinant, J. Am. Stat. Assoc. 79, 1984). What it
cannot see: an answer that is wrong in an ordinary way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mps_trainer.columns import Column
from mps_trainer.errors import ConfigError
from mps_trainer.tasks.base import AuxiliaryTask
from mps_trainer.tasks.batch import TaskBatch
from mps_trainer.tasks.token_features import NUM_REPETITIONS, NUM_STATISTICS, bucket_shares, repetition, statistics

_SURPRISES = (-1.0, -3.0)
_NUM_SPREAD = 2
NUM_FEATURES = NUM_STATISTICS + len(_SURPRISES) + NUM_REPETITIONS + _NUM_SPREAD
#: So far from the mean a standardised statistic counts: one absurd value must not outweigh all others.
_FURTHEST = 8.0
_NOISE = 0.1


class GaussianDensity(nn.Module):
    """(B, D) float -> (B,) negative log-likelihood per dimension, of standardised inputs."""

    def __init__(self, width: int, momentum: float) -> None:
        super().__init__()
        self.standardise = nn.BatchNorm1d(width, affine=False, momentum=momentum)
        self.mean = nn.Parameter(torch.zeros(width))
        self.log_diagonal = nn.Parameter(torch.zeros(width))
        self.below_diagonal = nn.Parameter(torch.zeros(width, width))

    def forward(self, features: Tensor) -> Tensor:
        """Shape (B,)."""
        if self.training and len(features) > 1:
            self.standardise(features.detach())
        # Always the running statistics, so that a batch of outliers cannot make itself the measure.
        running_mean, running_var = self.standardise.running_mean, self.standardise.running_var
        assert running_mean is not None
        assert running_var is not None
        x = ((features - running_mean) / (running_var + self.standardise.eps).sqrt()).clamp(-_FURTHEST, _FURTHEST)
        if self.training:
            # As if the covariance were C + noise^2 I: nearly collinear statistics would make L run away otherwise.
            x = x + _NOISE * torch.randn_like(x)
        factor = torch.tril(self.below_diagonal, -1) + torch.diag(self.log_diagonal.exp())
        distance = ((x - self.mean) @ factor).square().sum(dim=1)
        width = features.shape[1]
        nll: Tensor = distance / 2 - self.log_diagonal.sum() + width / 2 * math.log(2 * math.pi)
        return nll / width


class TokenOutlier(AuxiliaryTask):
    """A density over statistics of tokens; the score of an experience is how improbable it is.

    Args:
        contamination: the share of each batch that is left out of the fit; at least the share of outliers.
        max_tokens: the longest response that is read; longer ones are cut.
        num_buckets: hash buckets in which the spread of the tokens is measured.
        momentum: of the running means; 0.02 forgets a change of the policy in some fifty steps.
        learning_rate: of AdamW.
    """

    def __init__(
        self,
        contamination: float = 0.2,
        max_tokens: int = 4096,
        num_buckets: int = 256,
        momentum: float = 0.02,
        learning_rate: float = 2e-2,
    ) -> None:
        if not 0 <= contamination < 1:
            raise ConfigError(f"task_args.contamination is {contamination!r}", "use a share from 0 to below 1")
        for key, size in {"max_tokens": max_tokens, "num_buckets": num_buckets}.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"task_args.{key} is {size!r}", "use a whole number of at least 1")
        if not 0 < momentum <= 1:
            raise ConfigError(f"task_args.momentum is {momentum!r}", "use a number above 0 and up to 1")
        self.contamination = contamination
        self.max_tokens, self.num_buckets, self.momentum = max_tokens, num_buckets, momentum
        self.learning_rate, self.weight_decay = learning_rate, 0.0

    def columns(self) -> Sequence[Column]:
        """Tokens and logprobs of the response."""
        sequence = {"shape": (None,), "maximum": self.max_tokens}
        return [
            Column(name="tokens", source="response_tokens", dtype="int32", **sequence),  # type: ignore[arg-type]
            Column(name="logprobs", source="logprobs", required=False, **sequence),  # type: ignore[arg-type]
        ]

    def build_model(self) -> nn.Module:
        """The density on the CPU."""
        return GaussianDensity(NUM_FEATURES, self.momentum)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """Mean negative log-likelihood per statistic, in nats, of the batch without its `contamination` share."""
        scores = self.score(model, batch)
        return scores.sort().values[: max(1, round(batch.size * (1 - self.contamination)))].mean()

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """(B,): negative log-likelihood per statistic, in nats; it has no upper bound, so drop by quantile or top_k."""
        found: Tensor = model(self._features(batch))
        return found

    def _features(self, batch: TaskBatch) -> Tensor:
        tokens, logprobs = batch.ragged("tokens"), batch.ragged("logprobs")
        surprises = logprobs.mean_of(torch.stack([logprobs.values < limit for limit in _SURPRISES], dim=1))
        shares = bucket_shares(tokens, self.num_buckets)
        entropy = -(shares * shares.clamp(min=1e-12).log()).sum(dim=1)
        spread = torch.stack([shares.amax(dim=1), entropy / math.log(self.num_buckets + 1)], dim=1)
        return torch.cat([statistics(logprobs, tokens.lengths), surprises, repetition(tokens), spread], dim=1)

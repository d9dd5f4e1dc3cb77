"""The two auxiliary models of the benchmark, as tasks that anybody can name: a small one and a large one.

mps_trainer.bench.models:MlpClassifier     A: 1536-512-256-1, made for batches of 256
mps_trainer.bench.models:RewardModel       B: a transformer of 12 layers, 124 M, bf16 products, batches of 16 x 512
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mps_trainer.columns import Column
from mps_trainer.tasks import AuxiliaryTask, TaskBatch


class MlpClassifier(AuxiliaryTask):
    """A: does the reward exceed one half? From a feature vector of the last layer's width."""

    def __init__(self, width: int = 1536, hidden: tuple[int, int] | list[int] = (512, 256)) -> None:
        self.width, self.hidden = width, tuple(hidden)

    def columns(self) -> Sequence[Column]:
        """One vector."""
        return [Column(name="features", source="info.features", shape=(self.width,))]

    def build_model(self) -> nn.Module:
        """Three linear layers."""
        first, second = self.hidden
        return nn.Sequential(
            nn.Linear(self.width, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 1)
        )

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """Binary cross-entropy."""
        logits: Tensor = model(batch["features"]).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, (batch["reward"] > 0.5).float())

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """The probability."""
        return torch.sigmoid(model(batch["features"]).squeeze(1))


class _Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """(B, length) and (B,) -> (B,). Padding is attended to, so the work depends on the shape alone."""
        place = torch.arange(self.length, device=tokens.device)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            hidden = self.body(self.tokens(tokens) + self.positions(place))
            real = (place < lengths[:, None]).unsqueeze(2)
            mean = (hidden * real).sum(1) / lengths.clamp(min=1)[:, None]
            found: Tensor = self.head(mean).squeeze(1)
        return found.float()


class RewardModel(AuxiliaryTask):
    """B: the reward from a response's tokens."""

    learning_rate = 1e-4

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257, max_tokens: int = 512
    ) -> None:
        self.sizes = (layers, width, heads, vocabulary, max_tokens)
        self.vocabulary, self.max_tokens = vocabulary, max_tokens

    def columns(self) -> Sequence[Column]:
        """The response's tokens."""
        return [Column(name="tokens", source="response_tokens", dtype="int32", shape=(None,), maximum=self.max_tokens)]

    def build_model(self) -> nn.Module:
        """A pre-norm encoder with a mean and one output."""
        return _Transformer(*self.sizes)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """Squared error."""
        return nn.functional.mse_loss(self.score(model, batch), batch["reward"].float())

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """The reward that the model expects."""
        tokens = batch.ragged("tokens")
        ids = tokens.padded(self.max_tokens).long() % self.vocabulary
        found: Tensor = model(ids, tokens.lengths)
        return found

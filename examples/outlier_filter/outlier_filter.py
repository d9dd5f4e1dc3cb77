"""An outlier filter with a preference classifier, as a task of one's own.

The classifier learns from a hidden state (stored by the workflow in `experience.info["hidden_state"]`) whether a
rollout is better than the others of its task. Where reward and classifier disagree most, the reward is an outlier.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from mps_trainer import AuxiliaryTask, Column, TaskBatch


class OutlierFilter(AuxiliaryTask):
    learning_rate = 1e-3

    def __init__(self, input_dim: int, hidden_size: int = 256) -> None:
        self.input_dim, self.hidden_size = input_dim, hidden_size

    def columns(self) -> list[Column]:
        return [
            Column(name="hidden_state", source="info.hidden_state", shape=(self.input_dim,)),
            Column(name="group_mean", source="group.reward_mean"),
        ]

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.input_dim, self.hidden_size), nn.ReLU(), nn.Linear(self.hidden_size, 1))

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        logits = model(batch["hidden_state"]).squeeze(-1)
        return binary_cross_entropy_with_logits(logits, self.preferred(batch))

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return (self.preferred(batch) - self.probability(model, batch)).abs()

    def predictions(self, model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        return self.probability(model, batch), self.preferred(batch)

    def preferred(self, batch: TaskBatch) -> Tensor:
        return (batch["reward"] > batch["group_mean"]).float()

    def probability(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return torch.sigmoid(model(batch["hidden_state"]).squeeze(-1))

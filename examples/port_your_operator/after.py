"""After: the same model as a task. The sidecar trains it; the rollout goes on.

The classifier learns from a hidden state (stored by the workflow in `experience.info["hidden_state"]`) whether a
rollout is better than the others of its batch. Where reward and classifier disagree most, the reward is an outlier.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from mps_trainer import AuxiliaryTask, Column


class OutlierRewardFilter(AuxiliaryTask):
    learning_rate = 1e-2

    def __init__(self, input_dim=8):
        self.input_dim = input_dim

    def build_model(self):
        return nn.Sequential(nn.Linear(self.input_dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(self, model, batch):
        return binary_cross_entropy_with_logits(model(batch["hidden_state"]).squeeze(-1), self.better(batch))

    def score(self, model, batch):
        return (self.better(batch) - torch.sigmoid(model(batch["hidden_state"]).squeeze(-1))).abs()

    def better(self, batch):
        return (batch["reward"] > batch["mean_reward"]).float()

    def columns(self):
        hidden_state = Column(name="hidden_state", source="info.hidden_state", shape=(self.input_dim,))
        return [hidden_state, Column(name="mean_reward", source="batch.reward_mean")]

    def predictions(self, model, batch):  # optional: for the AUC
        return model(batch["hidden_state"]).squeeze(-1), self.better(batch)

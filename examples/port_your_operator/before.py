"""Before: an operator that trains its classifier on the CPU, inside `process`, while the rollout waits.

The classifier learns from a hidden state (stored by the workflow in `experience.info["hidden_state"]`) whether a
rollout is better than the others of its batch. Where reward and classifier disagree most, the reward is an outlier.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from trinity.buffer.operators import ExperienceOperatorV1


class OutlierRewardFilter(ExperienceOperatorV1):
    def __init__(self, input_dim=8):
        self.input_dim = input_dim
        self.model = self.build_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def build_model(self):
        return nn.Sequential(nn.Linear(self.input_dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(self, model, batch):
        return binary_cross_entropy_with_logits(model(batch["hidden_state"]).squeeze(-1), self.better(batch))

    def score(self, model, batch):
        return (self.better(batch) - torch.sigmoid(model(batch["hidden_state"]).squeeze(-1))).abs()

    def better(self, batch):
        return (batch["reward"] > batch["mean_reward"]).float()

    async def process(self, exps):
        hidden_state = torch.stack([torch.as_tensor(exp.info["hidden_state"], dtype=torch.float32) for exp in exps])
        reward = torch.tensor([exp.reward for exp in exps])
        batch = {"hidden_state": hidden_state, "reward": reward, "mean_reward": reward.mean()}
        with torch.no_grad():
            score = self.score(self.model, batch)
        for _ in range(4):
            self.optimizer.zero_grad()
            self.loss(self.model, batch).backward()
            self.optimizer.step()
        keep = score <= score.quantile(0.95)
        kept = [exp for exp, wanted in zip(exps, keep, strict=True) if wanted]
        return kept, {"outlier_filter/dropped": len(exps) - len(kept)}

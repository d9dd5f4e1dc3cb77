"""The built-in classifier whose loss is NaN after the dry step: it fails in the middle of a run."""

from __future__ import annotations

from torch import Tensor, nn

from mps_trainer import TaskBatch
from mps_trainer.tasks.preference_classifier import PreferenceClassifier


class NanLater(PreferenceClassifier):
    calls = 0

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        self.calls += 1
        loss = super().loss(model, batch)
        return loss if self.calls == 1 else loss * float("nan")

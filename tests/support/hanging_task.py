"""A task that hangs in its first step of real experiences."""

from __future__ import annotations

import time

from torch import Tensor, nn

from mps_trainer.tasks import TaskBatch
from mps_trainer.tasks.preference_classifier import PreferenceClassifier


class Hangs(PreferenceClassifier):
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        if batch.texts["eid"][0].startswith("e"):
            print("hangs now", flush=True)
            while True:
                time.sleep(0.1)
        return super().loss(model, batch)

"""The built-in classifier whose steps take $SLOW_STEP_S seconds each, as a large model's do."""

from __future__ import annotations

import os
import time

from torch import Tensor, nn

from mps_trainer import TaskBatch
from mps_trainer.tasks.preference_classifier import PreferenceClassifier


class SlowClassifier(PreferenceClassifier):
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        time.sleep(float(os.environ.get("SLOW_STEP_S", "0")))
        return super().loss(model, batch)

"""The task: the five small parts that a user writes to train an auxiliary model.

    columns     what of an experience the model needs        (also read beside the operator, numpy only)
    build_model the model
    loss        a batch -> one number to minimise
    score       a batch -> one number for each experience    (use: filter drops high ones; use: reward adds them)
    optimizer   how it learns                                (AdamW unless you say otherwise)

Optional: `predictions` lets the sidecar report the AUC on experiences that it has not trained on; `losses` lets it
draw those with a high loss more often (`replay.sampling: priority`); `classes` says what `class_balance` balances;
`metrics` has numbers of the task's own in each batch's line of metrics.jsonl; `prepare` does slow imports in good time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mps_trainer.columns import Column
from mps_trainer.tasks.batch import TaskBatch
from mps_trainer.tasks.optimizers import adamw


class AuxiliaryTask(ABC):
    """Base class of every task. The constructor takes the YAML's `task_args` as keyword arguments.

    Keep the constructor cheap: the operator builds the task too, to learn its columns.
    """

    learning_rate: float = 1e-3
    weight_decay: float = 0.01

    @abstractmethod
    def columns(self) -> Sequence[Column]:
        """What the model needs from every experience, each with dtype, shape and maximum."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new model on the CPU; it is moved to the device afterwards. Called under the run's seed."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """The mean loss over a batch: a scalar tensor."""

    @abstractmethod
    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """(B,) float: one score for each experience. Called under `torch.inference_mode`."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW (Loshchilov and Hutter, arXiv:1711.05101), fused, with this task's learning rate and weight decay."""
        return adamw(model.parameters(), self.learning_rate, self.weight_decay)

    def predictions(self, model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Tensor] | None:
        """What the model predicts and what came true: ((B,) float, (B,) in {0, 1}), or None without such a pair."""
        return None

    def losses(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """(B,) float: the loss of each experience, with `loss` their mean. Training uses it for `sampling: priority`.

        Leave it out where an experience has no loss of its own, or where a high one does not mean "more to learn".
        """
        raise NotImplementedError(f"{type(self).__name__} has no losses()")

    def classes(self, batch: TaskBatch) -> Tensor:
        """(B,) bool or whole numbers from 0 to 255: the class of each experience, for `class_balance`. On the CPU.

        Asked once, when an experience comes in. Unless a task says otherwise, it is whether the reward is above 0.5.
        """
        return batch["reward"] > 0.5

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the task's own since this was asked last, for the line of a batch; counted in `loss`, say."""
        return {}

    def prepare(self) -> None:  # noqa: B027  # optional, so not abstract
        """What `build_model` needs and needs no GPU, such as slow imports: called before the sidecar has a device.

        A sidecar that shares a GPU may be waited for by an engine while it builds its model. CUDA must not start here.
        """

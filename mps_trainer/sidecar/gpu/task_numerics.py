"""The task's own step on the GPU, under its share of the SMs, against the same step in float32 on the CPU.

The check of products (`numerics.py`) knows the shapes that go wrong; this one sees the task's. It compares the loss and
its gradient in evaluation mode, so that dropout does not speak. What cannot be compared (a step that draws random
numbers, that works on a GPU only, or that would keep one CPU core busy for seconds) is said in the log and refuses
nothing.
"""

from __future__ import annotations

import copy
import logging

import torch
from torch import Tensor, nn

from mps_trainer.columns import PackedBatch
from mps_trainer.errors import PlacementError
from mps_trainer.sidecar.gpu.faults import is_gpu_fault
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.tasks import AuxiliaryTask, TaskBatch
from mps_trainer.tasks.random_state import random_state, set_random_state

log = logging.getLogger(__name__)

#: Of the norm of the difference, relative to the norm: bfloat16 keeps 8 bits, and a step adds up its errors.
TOLERANCE = 0.05
#: About a second on one core.
_MOST_FLOPS = 3e10


def check_task_step(trainer: Trainer, packed: PackedBatch, share_percent: int) -> str:
    """Compare one step; the model is as before afterwards.

    Returns:
        What came of it, for the log: "right", or why nothing was compared, or at 100 % of the SMs what is wrong.

    Raises:
        PlacementError: the step is wrong under a share of the SMs.
    """
    flops = 6 * sum(p.numel() for p in trainer.model.parameters()) * _positions(packed)
    if flops > _MOST_FLOPS:
        return f"not compared with the CPU: about {flops / 1e9:.0f} GFLOP"
    random = random_state(trainer.device)
    try:
        found = _loss_and_gradient(trainer.task, trainer.model, packed, trainer.device)
        again = _loss_and_gradient(trainer.task, trainer.model, packed, trainer.device)
        on_cpu = copy.deepcopy(trainer.model).cpu().float()
        wanted = _loss_and_gradient(trainer.task, on_cpu, packed, torch.device("cpu"))
    except (RuntimeError, TypeError, ValueError) as error:
        if is_gpu_fault(error):
            raise
        return f"not compared with the CPU: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        set_random_state(trainer.device, random)
    if bool(torch.isfinite(found).all()) and _differ(found, again):
        return "not compared with the CPU: two steps on the same batch differ"
    if not _differ(found, wanted):
        return "right"
    what = f"the task's own step is wrong on this GPU: off by {_distance(found, wanted):.2g} of what the CPU gives"
    if share_percent < 100:
        raise PlacementError(what, "use 100 % of the SMs: other shares corrupt products without an error")
    log.warning("%s; look at how the task computes on a GPU", what)
    return what


def _positions(packed: PackedBatch) -> int:
    """Rows, or the elements of the longest sequence column: what a model passes its weights over."""
    ragged = [len(c.values) for c in packed.columns.values() if c.offsets is not None and not c.is_text]
    return max([packed.num_rows, *ragged])


def _loss_and_gradient(task: AuxiliaryTask, model: nn.Module, packed: PackedBatch, device: torch.device) -> Tensor:
    """(1 + P,) float32 on the CPU: the loss, then its gradient."""
    was_training = model.training
    model.eval()
    try:
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss = task.loss(model, TaskBatch.from_packed(packed, device))
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = [g.detach().flatten().float().cpu() for g in gradients if g is not None]
        return torch.cat([loss.detach().flatten().float().cpu(), *flat])
    finally:
        model.train(was_training)


def _distance(one: Tensor, other: Tensor) -> float:
    """The larger of the relative errors of loss and gradient; infinite when one is not finite."""
    parts = [(one[:1], other[:1]), (one[1:], other[1:])]
    errors = [
        float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp(min=1e-6)) for a, b in parts if len(a)
    ]
    return max(error if error == error else float("inf") for error in errors)


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or not _distance(one, other) <= TOLERANCE

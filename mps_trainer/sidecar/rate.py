"""The learning rate over the training steps: a linear warm-up, then constant, linear or cosine.

    step t < warmup:  (t + 1) / warmup
    later, with x = (t - warmup) / (steps - warmup), at most 1, and the share e that is left at the end:
        constant 1        linear 1 - (1 - e) x        cosine e + (1 - e) (1 + cos(pi x)) / 2

The cosine is one period of SGDR (Loshchilov and Hutter, arXiv:1608.03983, equation 5), without restarts. The factor is
on whatever rate the task's optimizer has, for each of its parameter groups.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mps_trainer.config import ScheduleSettings


def rate_factor(step: int, schedule: ScheduleSettings) -> float:
    """What the learning rate of training step `step` (the first is 0) is multiplied with."""
    if step < schedule.rate_warmup:
        return (step + 1) / schedule.rate_warmup
    if schedule.rate_steps is None:
        return 1.0
    done = min(1.0, (step - schedule.rate_warmup) / (schedule.rate_steps - schedule.rate_warmup))
    left = schedule.rate_end
    if schedule.rate == "linear":
        return 1 - (1 - left) * done
    return left + (1 - left) * (1 + math.cos(math.pi * done)) / 2


def rate_scheduler(optimizer: Optimizer, schedule: ScheduleSettings) -> LambdaLR | None:
    """A scheduler to step after each training step; None when the rate never changes."""
    if schedule.rate == "constant" and not schedule.rate_warmup:
        return None
    return LambdaLR(optimizer, lambda step: rate_factor(step, schedule))

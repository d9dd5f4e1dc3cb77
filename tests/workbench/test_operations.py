"""The number of operations that a task launches."""

from __future__ import annotations

import torch
from torch import nn

from mps_trainer.workbench.operations import count_operations


def test_views_are_free_and_every_other_operation_counts_once() -> None:
    a = torch.ones(4, 4)
    assert count_operations(lambda: a.t().reshape(2, 8)[0].unsqueeze(0)) <= 1
    assert count_operations(lambda: (a @ a).relu() + 1) == 3


def test_the_backward_pass_counts_too() -> None:
    model = nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4)
    forward = count_operations(lambda: model(x).sum())
    assert forward == 2
    assert count_operations(lambda: model(x).sum().backward()) > forward


def test_parts_multiply_it() -> None:
    """Four passes over a quarter each launch four times as much: what `micro_batch_size` costs beside an engine."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.ones(32, 4)
    whole = count_operations(lambda: model(x))
    assert count_operations(lambda: [model(part) for part in x.split(8)]) == 4 * whole

from __future__ import annotations

import torch
from torch import nn

from mps_trainer.sidecar.optimizer_state import flatten, unflatten
from mps_trainer.tasks.optimizers import adamw
from mps_trainer.workbench.operations import count_operations


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, begin: int = 0) -> list[torch.Tensor]:
    for step in range(begin, begin + steps):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def test_it_takes_the_steps_of_the_plain_one_in_fewer_operations() -> None:
    ours, theirs = network(), network()
    fused, reference = adamw(ours.parameters(), 1e-2, 0.1), plain(theirs)
    for found, wanted in zip(train(ours, fused, 30), train(theirs, reference, 30), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    # Four parameters: one operation for all of them and one for their counters of steps, against ten for each.
    assert count_operations(fused.step) <= 4 < 20 < count_operations(reference.step)


def test_a_state_goes_through_a_checkpoint_and_on_to_the_same_weights() -> None:
    whole, first, second = network(), network(), network()
    unbroken = train(whole, adamw(whole.parameters(), 1e-2, 0.1), 20)
    optimizer = adamw(first.parameters(), 1e-2, 0.1)
    train(first, optimizer, 12)
    second.load_state_dict(first.state_dict())
    successor = adamw(second.parameters(), 1e-2, 0.1)
    successor.load_state_dict(unflatten(*flatten(optimizer.state_dict())))
    assert all(map(torch.equal, unbroken, train(second, successor, 8, begin=12)))


def test_a_checkpoint_of_the_plain_one_can_be_resumed() -> None:
    whole, first, second = network(), network(), network()
    unbroken = train(whole, plain(whole), 20)
    optimizer = plain(first)
    train(first, optimizer, 12)
    second.load_state_dict(first.state_dict())
    successor = adamw(second.parameters(), 1e-2, 0.1)
    successor.load_state_dict(optimizer.state_dict())
    for found, wanted in zip(train(second, successor, 8, begin=12), unbroken, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_parameters_that_no_fused_kernel_takes_get_the_plain_one() -> None:
    complex_ones = [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]
    assert adamw(complex_ones, 1e-2, 0.0).param_groups[0]["fused"] is None
    assert adamw([*complex_ones, nn.Parameter(torch.zeros(2))], 1e-2, 0.0).param_groups[0]["fused"] is None

"""A module applied to a batch part by part, with the exact gradient of the whole and the memory of one part.

    forward    each part without a graph, and the random state before it
    backward   each part again, with a graph, dropped before the next part

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), across rows instead of layers; Gao et
al. (arXiv:2101.06983) do it for losses that compare rows. PyTorch's `checkpoint`, nested with that of layers, keeps
masks and position tables of every part, so it would grow with the batch. The price is a second buffer for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]


def in_parts(module: nn.Module, parts: Sequence[Inputs]) -> Tensor:
    """(B,): the outputs of `module(*part)`, (b,) each, one after the other; the inputs get no gradient."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if len(parts) == 1 or not torch.is_grad_enabled():
        return torch.cat([module(*part) for part in parts])
    found: Tensor = _InParts.apply(module, parts, *parameters)  # type: ignore[no-untyped-call]
    return found


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, parts: Sequence[Inputs], *parameters: Tensor) -> Tensor:
        ctx.module, ctx.parts, ctx.parameters = module, parts, parameters
        ctx.random, found = [], []
        for part in parts:
            ctx.random.append(_random_state(part[0].device))
            found.append(module(*part))
        ctx.sizes = [len(one) for one in found]
        return torch.cat(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total: list[Tensor | None] = [None] * len(ctx.parameters)
        for part, random, wanted in zip(ctx.parts, ctx.random, torch.split(gradient, ctx.sizes), strict=True):
            device = part[0].device
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
                # Dropout must leave out what it left out in the forward pass.
                _set_random_state(device, random)
                output = ctx.module(*part)
            found = torch.autograd.grad(output, ctx.parameters, wanted, allow_unused=True)
            total = [_sum(one, other) for one, other in zip(total, found, strict=True)]
        return None, None, *total


def _sum(total: Tensor | None, other: Tensor | None) -> Tensor | None:
    if total is None or other is None:
        return other if total is None else total
    return total.add_(other)


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random_state(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)

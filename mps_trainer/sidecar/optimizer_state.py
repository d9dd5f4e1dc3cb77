"""An optimizer's state as a checkpoint holds it: named tensors, and plain JSON values.

Its own module because two need it: the checkpoint, and the dry step, which finds out before READY whether the
optimizer of a task can be saved at all.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from mps_trainer.errors import TaskError


def check_saveable(optimizer: torch.optim.Optimizer) -> None:
    """TaskError when the state after a step holds something that a checkpoint cannot."""
    _, plain = flatten(optimizer.state_dict())
    try:
        json.dumps(plain, default=as_number)
    except (TypeError, ValueError) as error:
        raise _cannot_hold(f"keeps options that are no plain values ({error})") from error


def flatten(optimizer: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of `state_dict()`: the tensors, named <parameter>.<name>, and the rest."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer["state"].items():
        scalars[str(parameter)] = {}
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{parameter}.{name}"] = value
            else:
                scalars[str(parameter)][name] = value
    return tensors, {"scalars": scalars, "param_groups": optimizer["param_groups"]}


def unflatten(tensors: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Any]:
    """What `flatten` took apart."""
    entries: dict[int, dict[str, Any]] = {int(key): dict(value) for key, value in state["scalars"].items()}
    for key, tensor in tensors.items():
        parameter, _, name = key.partition(".")
        entries[int(parameter)][name] = tensor
    return {"state": entries, "param_groups": state["param_groups"]}


def as_number(value: Any) -> float:
    """For `json.dumps`: a tensor of one number as that number; TaskError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.item())
    raise _cannot_hold(f"keeps a {type(value).__name__}")


def _cannot_hold(what: str) -> TaskError:
    return TaskError(
        f"the optimizer {what}, which a checkpoint cannot hold",
        "use an optimizer whose state is tensors and whose options are plain numbers",
    )

"""Checkpoints: folders that are whole or not there.

    checkpoints/step-<n>/
        model.safetensors        the weights
        optimizer.safetensors    its tensors, named <parameter>.<name>
        replay.safetensors       the replay buffer's rows, their losses and classes, the ids it knows, planned passes
        random.safetensors       the random states of torch, numpy and Python
        state.json               everything else, to be read by people too: counters, the learning-rate schedule, the
                                 buffer's random state, the place in the journal; written last

A checkpoint is written under a temporary name and renamed. No fsync, as in the journal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor

from mps_trainer.columns import Array
from mps_trainer.errors import RunError
from mps_trainer.sidecar.optimizer_state import as_number, flatten, unflatten
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.tasks.random_state import random_state, set_random_state

_log = logging.getLogger(__name__)
FORMAT = 2


@dataclass(kw_only=True)
class Checkpoint:
    """What is saved beside the trainer.

    Attributes:
        replay: arrays of the replay buffer.
        state: plain JSON values: counters, random states, where the journal goes on.
    """

    replay: dict[str, Array]
    state: dict[str, Any]


def save_checkpoint(folder: Path, trainer: Trainer, checkpoint: Checkpoint, keep: int) -> Path:
    """Write `folder`/step-<n> and delete all but the newest `keep`; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{trainer.step}"
    temporary = folder / f".step-{trainer.step}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write(temporary, trainer, checkpoint)
    except BaseException:
        # On a full disk it would only be in the way of the next try.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():
        # The same step again (a checkpoint for the journal's sake): nothing can replace a full folder in one call.
        final.rename(folder / f".step-{trainer.step}.{os.getpid()}.old")
    temporary.rename(final)
    for path in [*checkpoints(folder)[keep:], *folder.glob(".step-*")]:
        shutil.rmtree(path, ignore_errors=True)
    return final


def _write(temporary: Path, trainer: Trainer, checkpoint: Checkpoint) -> None:
    save_file(_owned(trainer.model.state_dict()), temporary / "model.safetensors")
    tensors, scalars = flatten(trainer.optimizer.state_dict())
    save_file(_owned(tensors), temporary / "optimizer.safetensors")
    save_arrays(
        {name: np.ascontiguousarray(array) for name, array in checkpoint.replay.items()},
        temporary / "replay.safetensors",
    )
    save_file(random_state(trainer.device), temporary / "random.safetensors")
    state = {"format": FORMAT, "step": trainer.step, "torch": torch.__version__, **checkpoint.state}
    if trainer.scheduler is not None:
        state["rate"] = trainer.scheduler.state_dict()
    (temporary / "state.json").write_text(json.dumps({**state, "optimizer": scalars}, indent=1, default=as_number))


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, newest first."""
    found = [path for path in folder.glob("step-*") if (path / "state.json").exists()]
    # Somebody may have put a copy beside them: step-80.bak is none of ours.
    ours = [path for path in found if path.name.removeprefix("step-").isdecimal()]
    return sorted(ours, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def oldest_position(folder: Path, newest: int) -> int:
    """The file of the journal in which the oldest checkpoint goes on: no later one of them needs an earlier file.

    Args:
        newest: that of the newest checkpoint.
    """
    found = [newest]
    for path in checkpoints(folder):
        # What cannot be read here could not be resumed from either.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            found.append(int(json.loads((path / "state.json").read_text())["journal"][0]))
    return min(found)


def load_newest(folder: Path, trainer: Trainer) -> Checkpoint | None:
    """Put the newest readable checkpoint into the trainer; None when there is none.

    One that cannot be read (the disk, a power cut) is skipped with a warning, and renamed to damaged-step-<n> once an
    older one was read: it must not count among those that are kept. RunError when there are some and none can be read.
    """
    _restore_interrupted(folder)
    found = checkpoints(folder)
    for number, path in enumerate(found):
        checkpoint = _try_load(path, trainer)
        if checkpoint is not None:
            for damaged in found[:number]:
                shutil.rmtree(folder / f"damaged-{damaged.name}", ignore_errors=True)
                damaged.rename(folder / f"damaged-{damaged.name}")
            return checkpoint
    if found:
        raise RunError(
            f"none of the {len(found)} checkpoints in {folder} can be used",
            "the warnings above say why; move the folder away to start from new weights",
        )
    return None


def _try_load(path: Path, trainer: Trainer) -> Checkpoint | None:
    try:
        return _load(path, trainer)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        _log.warning("checkpoint %s cannot be used: %s", path, error)
        return None


def _load(path: Path, trainer: Trainer) -> Checkpoint:
    state = json.loads((path / "state.json").read_text())
    if state["format"] != FORMAT:
        raise ValueError(f"its format is {state['format']}, this version reads {FORMAT}")
    replay = load_arrays(path / "replay.safetensors")
    tensors = load_file(path / "optimizer.safetensors")
    random = load_file(path / "random.safetensors")
    trainer.model.load_state_dict(load_file(path / "model.safetensors"))
    trainer.optimizer.load_state_dict(unflatten(tensors, state["optimizer"]))
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(state["rate"])
    set_random_state(trainer.device, random)
    trainer.step = state["step"]
    return Checkpoint(replay=replay, state=state)


def _restore_interrupted(folder: Path) -> None:
    # Killed between the two renames of save_checkpoint: the old folder is whole, and the new one has every file.
    for path in folder.glob(".step-*.old"):
        final = folder / path.name[1:].split(".")[0]
        if not final.exists():
            path.rename(final)


def _owned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # safetensors refuses tensors that share memory (tied weights): each gets bytes of its own.
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}

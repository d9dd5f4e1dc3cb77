"""Tasks that one marked experience (reward -1) kills or hangs; a made-up batch never holds exactly that."""

from __future__ import annotations

import ctypes
import os
import time

from torch import Tensor, nn

from mps_trainer import AuxiliaryTask, Column, TaskBatch

ASSERT = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."


class _Marked(AuxiliaryTask):
    """`strike` is called for a marked batch in the function that `task_args: {where: ...}` names."""

    def __init__(self, where: str = "loss") -> None:
        self.where = where

    def columns(self) -> list[Column]:
        return []

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        self._meet("loss", batch)
        return model(batch["reward"].unsqueeze(1)).square().mean()

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        self._meet("score", batch)
        return model(batch["reward"].unsqueeze(1)).squeeze(1)

    def predictions(self, model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Tensor] | None:
        self._meet("predictions", batch)
        return None

    def _meet(self, where: str, batch: TaskBatch) -> None:
        if where == self.where and bool((batch["reward"] == -1).any()):
            self.strike()

    def strike(self) -> None:
        raise NotImplementedError


class Aborts(_Marked):
    def strike(self) -> None:
        os.abort()


class Segfaults(_Marked):
    def strike(self) -> None:
        ctypes.string_at(0)


class AssertsOnDevice(_Marked):
    """As torch tells of a device-side assert; here there is no device."""

    def strike(self) -> None:
        raise RuntimeError(ASSERT)


class Hangs(_Marked):
    def strike(self) -> None:
        while True:
            time.sleep(0.05)


class HangsInC(_Marked):
    """A call that holds nothing, returns never and cannot be interrupted by Python."""

    def strike(self) -> None:
        libc = ctypes.PyDLL(None)
        while True:
            # PyDLL keeps the GIL: no other thread of Python runs, no handler of a signal either.
            libc.usleep(200_000)


class Slow(_Marked):
    """9 s for the marked one, 2 s for each other batch: longer than the grace of one that hangs."""

    def _meet(self, where: str, batch: TaskBatch) -> None:
        if where == self.where:
            time.sleep(9 if bool((batch["reward"] == -1).any()) else 2)


class KilledFromOutside(_Marked):
    """SIGKILL, as the kernel's OOM killer sends it."""

    def strike(self) -> None:
        os.kill(os.getpid(), 9)


def rows(eids: list[str], marked: str = "") -> dict[str, object]:
    """Experiences with reward 1, and -1 for the marked one."""
    import numpy as np

    reward = np.array([-1.0 if eid == marked else 1.0 for eid in eids], np.float32)
    return {"eid": eids, "group": ["t"] * len(eids), "reward": reward}

"""What runs before it is known on which GPU the sidecar will be: it must not start CUDA.

CUDA reads CUDA_VISIBLE_DEVICES and the variables of MPS once, when the driver starts. So the task's module and its
constructor, which run while the sidecar waits for an engine, must leave it alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mps_trainer.errors import PlacementError
from mps_trainer.sidecar.gpu.driver import has_started

_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@contextmanager
def untouched_gpu() -> Iterator[None]:
    """Within, `torch.cuda.is_available()` asks NVML and starts nothing; PlacementError when CUDA has started after."""
    before = os.environ.get(_BY_NVML)
    # A module that says `DEVICE = "cuda" if torch.cuda.is_available() else "cpu"` would start the driver otherwise.
    os.environ[_BY_NVML] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BY_NVML]
        else:
            os.environ[_BY_NVML] = before
    if torch.cuda.is_initialized() or has_started():  # type: ignore[no-untyped-call]
        raise PlacementError(
            "CUDA had started before this process could join MPS",
            "use no CUDA when the task's module is imported or its constructor runs; build_model() may use it",
        )

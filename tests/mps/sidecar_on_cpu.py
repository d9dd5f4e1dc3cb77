"""The real sidecar with a mocked GPU: it needs the supervisor's placement, as ever, and trains on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch

from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.sidecar import startup
from mps_trainer.sidecar.__main__ import main


class MockedGpu:
    device = torch.device("cpu")

    def __init__(self, run_id: str, lap: Callable[[str], object]) -> None:
        self.placement = GpuPlacement.load(mps_folder(run_id))
        self._lap = lap
        lap("context")

    def secure(self, worst_step: Callable[[], None]) -> SimpleNamespace:
        worst_step()
        self._lap("dry step")
        return SimpleNamespace(step_ms=1.0)


startup.SharedGpu = MockedGpu  # type: ignore[assignment,misc]

if __name__ == "__main__":
    sys.exit(main())

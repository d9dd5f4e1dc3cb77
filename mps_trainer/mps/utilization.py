"""How busy NVML says that a GPU is: sampled by the supervisor, for a pace that hears of no engine.

Maker: the supervisor, now and then. Eater: the sidecar. File `utilization` in the run's MPS folder:
seconds of CLOCK_MONOTONIC and percent. NVML counts everybody's kernels, the sidecar's own too.
"""

from __future__ import annotations

import contextlib
import logging
import time

import pynvml

from mps_trainer.mps.folder import MpsFolder
from mps_trainer.run.private_files import write_private

log = logging.getLogger("mps_trainer.supervisor")
_EVERY_S = 0.5


class Utilization:
    """The supervisor's side. What fails costs the signal, told once."""

    def __init__(self, folder: MpsFolder) -> None:
        self._path = folder.path / "utilization"
        self._next = 0.0
        self._failed = False

    def sample(self, gpu_uuid: str) -> None:
        """Write what NVML says, at most every half second; cheap otherwise."""
        if self._failed or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        try:
            pynvml.nvmlInit()
            try:
                percent = pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)).gpu
            finally:
                pynvml.nvmlShutdown()
            write_private(self._path, f"{time.monotonic()} {int(percent)}")
        except (pynvml.NVMLError, OSError) as error:
            self._failed = True
            log.info("nobody tells how busy GPU %s is: %s", gpu_uuid, error)


def read_utilization(folder: MpsFolder) -> tuple[float, float] | None:
    """(when, percent) of the last sample; None without one."""
    with contextlib.suppress(OSError, ValueError):
        at, percent = (folder.path / "utilization").read_text().split()
        return float(at), float(percent)
    return None

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
_LONGEST_PAUSE_S = 60.0


class Utilization:
    """The supervisor's side. What fails is told once, costs the signal meanwhile, and is tried again, ever less often.

    Args:
        wanted: somebody reads it: the run is paced.
    """

    def __init__(self, folder: MpsFolder, *, wanted: bool = True) -> None:
        self._path = folder.path / "utilization"
        self._wanted = wanted
        self._next = 0.0
        self._pause_s = _EVERY_S

    def sample(self, gpu_uuid: str) -> None:
        """Write what NVML says, at most every half second; cheap otherwise."""
        if not self._wanted or time.monotonic() < self._next:
            return
        try:
            pynvml.nvmlInit()
            try:
                percent = pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)).gpu
            finally:
                pynvml.nvmlShutdown()
            write_private(self._path, f"{time.monotonic()} {int(percent)}")
        except (pynvml.NVMLError, OSError) as error:
            self._failed(gpu_uuid, error)
        else:
            if self._pause_s > _EVERY_S:
                log.info("NVML tells again how busy GPU %s is", gpu_uuid)
            self._pause_s = _EVERY_S
        self._next = time.monotonic() + self._pause_s

    def _failed(self, gpu_uuid: str, error: Exception) -> None:
        if self._pause_s == _EVERY_S:
            log.warning(
                "NVML does not tell how busy GPU %s is (%s): where no engine speaks either, the pace goes by the "
                "arrival of batches; see whether `nvidia-smi` works and %s has room. It is tried again",
                gpu_uuid, error, self._path.parent,
            )  # fmt: skip
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def read_utilization(folder: MpsFolder) -> tuple[float, float] | None:
    """(when, percent) of the last sample; None without one."""
    with contextlib.suppress(OSError, ValueError):
        at, percent = (folder.path / "utilization").read_text().split()
        return float(at), float(percent)
    return None

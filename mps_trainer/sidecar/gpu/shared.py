"""From a CUDA process to one that may share a GPU: each claim of READY, proven in this order.

the right GPU > client of our server > products right under this share > the task's step > memory taken and capped
> the task's step again, inside of it
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mps_trainer.errors import PlacementError, TaskError
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.sidecar.gpu.driver import memory_info
from mps_trainer.sidecar.gpu.numerics import NumericsReport, check_numerics
from mps_trainer.sidecar.gpu.reservation import MIB, Reservation, small_peak

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proof:
    """What READY rests on, for the log and the status. Sizes in bytes."""

    gpu_uuid: str
    is_client: bool
    numerics: NumericsReport
    limit: int
    pool: int
    refused: int
    step_peak: int
    step_ms: float


class SharedGpu:
    """The one GPU that this process sees, as a client of the run's MPS daemon."""

    def __init__(self, run_id: str, lap: Callable[[str], object] = lambda _: None) -> None:
        """Set the environment and make the CUDA context; nothing in this process may have used CUDA before.

        Args:
            run_id: whose placement it is.
            lap: called with the name of each part that is done.

        Raises:
            PlacementError: CUDA runs already, or this is not the GPU or not the server that the plan says.
        """
        self._lap = lap
        self._folder = mps_folder(run_id)
        self.placement = GpuPlacement.load(self._folder)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise PlacementError(
                "CUDA had started before this process could join MPS",
                "use no CUDA when the task's module is imported or its constructor runs",
            )
        # In the process itself and not by its parent: for `device: auto` the GPU is known only now.
        for name in [name for name in os.environ if name.startswith("CUDA_MPS_")]:
            del os.environ[name]
        os.environ.update(self.placement.environment({}, self._folder))
        if not torch.cuda.is_available():
            raise PlacementError(
                f"torch {torch.__version__} sees no CUDA device",
                "install a torch build for this driver; `mps-trainer doctor` shows the driver's version",
            )
        self.device = torch.device("cuda:0")
        torch.zeros(1, device=self.device)
        found = "GPU-" + str(torch.cuda.get_device_properties(self.device).uuid).removeprefix("GPU-")
        if found != self.placement.gpu_uuid:
            raise PlacementError(
                f"the sidecar is on {found}, the plan says {self.placement.gpu_uuid}", "start it again"
            )
        self._is_client = MpsDaemon(self._folder).is_client(os.getpid())
        if not self._is_client:
            raise PlacementError(
                f"process {os.getpid()} is no client of the MPS daemon in {self._folder.pipe_dir}",
                "daemon and sidecar must be of one user and one container; `mps-trainer doctor` looks at both",
            )
        lap("context")
        self._numerics = check_numerics(self.device)
        self._numerics.require_right(self.placement.share_percent)
        lap("numerics")
        self.reservation: Reservation | None = None

    def secure(self, worst_step: Callable[[], None]) -> Proof:
        """Take the reservation around the task's worst-case step, and do that step inside of it.

        Args:
            worst_step: one training step and one scoring of the largest batch; leaves the model as it was.

        Raises:
            PlacementError: the step needs more than the pool; the message says how much.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        worst_step()
        peak, small = torch.cuda.max_memory_reserved(self.device), small_peak(self.device)
        if peak > self.placement.pool:
            raise self._too_small(peak)
        self._lap("dry step")
        self.reservation = Reservation.take(self.device, self.placement.pool, self.placement.limit, small)
        started = time.perf_counter()
        try:
            worst_step()
        except TaskError as error:
            if "out of memory" in str(error):
                # It fits, but not into the segments of a pool that never changes.
                raise self._too_small(max(peak, self.placement.pool) * 5 // 4) from error
            raise
        torch.cuda.synchronize(self.device)
        self._lap("reservation")
        step_ms = 1e3 * (time.perf_counter() - started)
        self.reservation.check_constant(self.device)
        report = self.reservation.report
        proof = Proof(
            gpu_uuid=self.placement.gpu_uuid,
            is_client=self._is_client,
            numerics=self._numerics,
            limit=report.limit,
            pool=report.pool,
            refused=report.refused,
            step_peak=peak,
            step_ms=step_ms,
        )
        log.info(
            "MPS client of %s: %d MiB taken (worst step %d MiB), %d products right, step %.1f ms",
            proof.gpu_uuid, proof.pool // MIB, peak // MIB, proof.numerics.cases, proof.step_ms,
        )  # fmt: skip
        log.info("%d MiB of the limit are left for kernels that CUDA loads later", memory_info()[0] // MIB)
        return proof

    def _too_small(self, need: int) -> PlacementError:
        need = -(-need // MIB)
        return PlacementError(
            f"memory: {self.placement.pool // MIB}MiB is too little: the task's worst-case step takes {need} MiB",
            f"set memory to at least {need + need // 8}MiB, or lower batch_size or the columns' maxima",
        )

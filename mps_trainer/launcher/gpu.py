"""What NVML says of the GPUs. No CUDA context is made, so asking costs no GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mps_trainer.errors import PlacementError
from mps_trainer.mps.nvml import GpuFacts, read_nvml


@dataclass(frozen=True)
class Gpu:
    """One GPU; sizes in bytes. `index` is NVML's, which is the order of the PCI bus."""

    index: int
    uuid: str
    name: str
    total: int
    free: int
    mig: bool = False


@dataclass(frozen=True)
class GpuReading:
    """The GPUs of this machine, or why there are none to see.

    Attributes:
        gpus: in NVML's order; empty without NVML.
        driver: the driver's version; "" without NVML.
        missing: why NVML could not be asked; "" when it could.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    missing: str = ""

    def why_none(self) -> str:
        """Why there is no GPU, for a message."""
        return self.missing or "NVML sees no GPU"


def read_gpus() -> GpuReading:
    """Ask NVML; a machine without it is an answer and not an error."""
    facts = read_nvml()
    gpus = tuple(Gpu(g.index, g.uuid, g.name, g.total, g.total - g.used, g.mig) for g in facts.gpus)
    return GpuReading(gpus=gpus, driver=facts.driver, missing=facts.missing)


def gpu_at(gpus: Sequence[GpuFacts], index: int) -> GpuFacts:
    """The GPU `cuda:<index>` as NVML counts; PlacementError when there is none."""
    found = next((gpu for gpu in gpus if gpu.index == index), None)
    if found is None:
        raise PlacementError(f"there is no cuda:{index}: NVML sees {len(gpus)} GPUs", "name a GPU that is there")
    return found

"""What NVML says of the GPUs. No CUDA context is made, so asking costs no GPU memory."""

from __future__ import annotations

from dataclasses import dataclass

import pynvml


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
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuReading(missing=f"no NVML ({error})")
    try:
        gpus = tuple(_read(index) for index in range(pynvml.nvmlDeviceGetCount()))
        return GpuReading(gpus=gpus, driver=_text(pynvml.nvmlSystemGetDriverVersion()))
    except pynvml.NVMLError as error:
        return GpuReading(missing=f"NVML failed ({error})")
    finally:
        pynvml.nvmlShutdown()


def _read(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total=int(memory.total),
        free=int(memory.free),
        mig=_mig_mode(handle),
    )


def _mig_mode(handle: object) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        # GPUs that know no MIG answer with an error.
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

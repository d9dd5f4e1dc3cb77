"""What NVML says of the GPUs that concerns sharing them. Makes no CUDA context."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import pynvml

from mps_trainer.errors import PlacementError

COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU. `used` is in bytes, 0 when NVML does not tell; `name` may be ""."""

    pid: int
    used: int
    name: str


@dataclass(frozen=True)
class GpuFacts:
    """One GPU; sizes in bytes.

    Attributes:
        index: NVML's index.
        compute_mode: a value of `COMPUTE_MODES`.
        mig: it is cut into MIG instances.
        processes: who is on it.
    """

    index: int
    uuid: str
    name: str
    total: int
    used: int
    compute_mode: str
    mig: bool
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class NvmlFacts:
    """All GPUs and the driver; `missing` says why there are none to see."""

    gpus: tuple[GpuFacts, ...] = ()
    driver: str = ""
    missing: str = ""


def read_nvml() -> NvmlFacts:
    """Ask NVML. A machine without it is an answer and not an error."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvmlFacts(missing=f"no NVML ({error})")
    try:
        gpus = tuple(_read(i) for i in range(pynvml.nvmlDeviceGetCount()))
        return NvmlFacts(gpus, _text(pynvml.nvmlSystemGetDriverVersion()))
    except pynvml.NVMLError as error:
        return NvmlFacts(missing=f"NVML failed ({error})")
    finally:
        pynvml.nvmlShutdown()


def read_processes(gpu_uuid: str) -> tuple[GpuProcess, ...]:
    """Who is on one GPU now, clients of MPS included; PlacementError when NVML does not say."""
    try:
        pynvml.nvmlInit()
        try:
            return _processes(pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise PlacementError(f"NVML does not say who is on GPU {gpu_uuid} ({error})", "see `nvidia-smi`") from None


def _read(index: int) -> GpuFacts:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuFacts(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total=int(memory.total),
        used=int(memory.used),
        compute_mode=COMPUTE_MODES.get(pynvml.nvmlDeviceGetComputeMode(handle), "unknown"),
        mig=_has_mig(handle),
        processes=_processes(handle),
    )


def _processes(handle: object) -> tuple[GpuProcess, ...]:
    # Clients of MPS stand in a list of their own; a server and other processes stand in the ordinary one.
    found = {int(p.pid): int(p.usedGpuMemory or 0) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    with contextlib.suppress(pynvml.NVMLError):
        found.update(
            {int(p.pid): int(p.usedGpuMemory or 0) for p in pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)}
        )
    return tuple(GpuProcess(pid, used, _name_of(pid)) for pid, used in sorted(found.items()))


def _has_mig(handle: object) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        # GPUs that know no MIG answer with an error.
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _name_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
    return words[0].decode(errors="replace").rpartition("/")[2]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

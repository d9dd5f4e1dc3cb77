"""From the ring to the GPU with no copy on the CPU.

The driver copies from memory that it knows (registered, page-locked) by DMA at the speed of PCIe; from other memory it
goes through a buffer of its own, about ten times slower. So each segment's mapping is registered once, and a
batch's columns are copied from where the operator wrote them.

    attach: register > batch: copies start, an event behind them > wait: the event is done > the slot is released
    detach: wait > unregister > unmap

Where the driver refuses, the same calls copy from the memory as it is, and each copy is waited for at once.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import warnings
from typing import Protocol

import torch
from torch import Tensor

from mps_trainer.columns import Array, PackedBatch
from mps_trainer.sidecar.gpu.driver import register_host, unregister_host
from mps_trainer.tasks import TaskBatch
from mps_trainer.transport import Segment

log = logging.getLogger(__name__)


class Cuda(Protocol):
    """What is asked of CUDA; statuses are the driver's, 0 for success."""

    def register(self, address: int, num_bytes: int) -> int:
        """Page-lock whole pages."""

    def unregister(self, address: int) -> int:
        """Undo `register`."""

    def record(self) -> None:
        """Set the event behind all copies that were started."""

    def synchronize(self) -> None:
        """Wait until the event has happened; it has when it was never set."""


class RealCuda:
    """`Cuda` on one device, on the stream that is current there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def register(self, address: int, num_bytes: int) -> int:
        """See `Cuda`."""
        # The driver's call needs the device's context, and that to be the current one; a model without parameters has
        # made none yet.
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            return register_host(address, num_bytes)

    def unregister(self, address: int) -> int:
        """See `Cuda`."""
        with torch.cuda.device(self._device):
            return unregister_host(address)

    def record(self) -> None:
        """See `Cuda`."""
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """See `Cuda`."""
        self._event.synchronize()


def ring_for(device: torch.device) -> RingMemory | None:
    """What a sidecar on `device` needs; None on the CPU."""
    return RingMemory(device) if device.type == "cuda" else None


class RingMemory:
    """The registered mappings of one process, and copies out of them.

    Attributes:
        registered: whether every ring's mapping was accepted so far; None before the first one.
    """

    def __init__(self, device: torch.device, cuda: Cuda | None = None) -> None:
        self._device = device
        self._cuda = cuda or RealCuda(device)
        self._registered: dict[int, int] = {}
        self._refused: set[int] = set()
        self._has_warned = False
        self.registered: bool | None = None
        # The views of a lease are read-only, and nothing here writes to them. For good, since a filter costs more time
        # than the start of a copy.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)

    def attach(self, segment: Segment) -> None:
        """Register a ring's mapping; it is unregistered before it is unmapped. For the hub's `on_attach`."""
        # Left first: should the registration be interrupted, the end of the mapping still undoes it.
        segment.before_unmap(lambda: self.forget(segment.address))
        accepted = self.register(segment.address, segment.nbytes)
        self.registered = accepted and self.registered is not False

    def register(self, address: int, num_bytes: int) -> bool:
        """Page-lock a mapping; False where the system refuses, the first time with a warning. Again is no error."""
        if address in self._registered:
            return True
        if address in self._refused:
            return False
        # A mapping ends with its last page, whatever its length says.
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        status = self._cuda.register(address, num_bytes)
        if status == 0:
            self._registered[address] = num_bytes
            return True
        self._refused.add(address)
        log.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "%d MiB of the ring could not be page-locked (CUDA error %d), so batches reach the GPU about ten times "
            "slower; raise the limit on locked memory (ulimit -l, docker run --ulimit memlock=-1, LimitMEMLOCK= of a "
            "systemd unit)",
            num_bytes // 2**20,
            status,
        )
        self._has_warned = True
        return False

    def forget(self, address: int) -> None:
        """Unregister a mapping before it is unmapped, when no copy out of it is under way."""
        was_registered = self._registered.pop(address, 0)
        self._refused.discard(address)
        # A context that a fault has broken raises; it has nothing left to wait for, and the unmapping must go on.
        with contextlib.suppress(RuntimeError):
            self.wait()
        with contextlib.suppress(RuntimeError):
            status = self._cuda.unregister(address) if was_registered else 0
            if status:
                log.warning("a mapping could not be unregistered (CUDA error %d)", status)

    def batch(self, packed: PackedBatch) -> TaskBatch:
        """Start the copies of a batch. The memory of `packed` must stay until `wait`, also when this raises."""
        try:
            return TaskBatch.from_packed(packed, self._device, self.to_device)
        finally:
            # An error in the middle leaves copies under way as well.
            self._cuda.record()

    def to_device(self, array: Array) -> Tensor:
        """Copy one column, same shape and dtype: out of a registered mapping only started, out of other memory done."""
        source = torch.from_numpy(array)
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        return target.copy_(source, non_blocking=self._is_registered(source.data_ptr(), array.nbytes))

    def wait(self) -> None:
        """Wait for the copies of every `batch` so far, and for nothing that was queued later."""
        self._cuda.synchronize()

    def close(self) -> None:
        """Unregister everything."""
        for address in list(self._registered):
            self.forget(address)

    def _is_registered(self, begin: int, num_bytes: int) -> bool:
        return any(at <= begin and begin + num_bytes <= at + size for at, size in self._registered.items())

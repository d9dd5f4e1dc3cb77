"""From the ring to the GPU with no copy on the CPU.

The driver copies from memory that it knows (registered, page-locked) by DMA at the speed of PCIe; from other memory it
goes through a buffer of its own, about ten times slower. So each segment's mapping is registered once, and a
batch's columns are copied from where the operator wrote them.

    register > to_device (asynchronous) > wait > only then is the slot released
"""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor

from mps_trainer.columns import Array

log = logging.getLogger(__name__)


class RingMemory:
    """The registered mappings of one process, and copies out of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._registered: dict[int, int] = {}
        self._refused: set[int] = set()

    def register(self, address: int, num_bytes: int) -> bool:
        """Page-lock a mapping; False, with one line in the log, where the system refuses. Again is no error."""
        if address in self._registered:
            return True
        if address in self._refused:
            return False
        # The status comes back as an enum, and the binding has no stub.
        status = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]
        if status == 0:
            self._registered[address] = num_bytes
            return True
        self._refused.add(address)
        log.warning(
            "the ring's %d MiB could not be page-locked (CUDA error %d), so batches reach the GPU about ten times "
            "slower; raise the limit on locked memory (ulimit -l, docker run --ulimit memlock=-1)",
            num_bytes // 2**20,
            status,
        )
        return False

    def forget(self, address: int) -> None:
        """Unregister a mapping before it is unmapped."""
        if self._registered.pop(address, 0):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._refused.discard(address)

    def to_device(self, array: Array) -> Tensor:
        """Start the copy of a column; same shape and dtype. The array's memory must stay until `wait`."""
        with warnings.catch_warnings():
            # The views of a lease are read-only, and nothing here writes to them.
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(array).to(self._device, non_blocking=True)

    def wait(self) -> None:
        """Wait for the copies that were started, and for nothing that is queued after this call."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()

    def close(self) -> None:
        """Unregister everything."""
        for address in list(self._registered):
            self.forget(address)

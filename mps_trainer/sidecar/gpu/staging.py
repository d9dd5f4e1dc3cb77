"""Page-locked memory for one training batch: drawn from the replay buffer into it, copied to the GPU out of it.

Sized for the largest batch that the columns allow and made before READY, so that the memory of the process is constant.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from mps_trainer.columns import Array, Column
from mps_trainer.sidecar.gpu.ring_memory import RingMemory
from mps_trainer.sidecar.replay import Empty

log = logging.getLogger(__name__)
_ALIGNMENT = 64
#: Page-locked memory is lost to everybody else on the machine; a batch beyond it takes the slower way.
MAX_BYTES = 256 * 2**20


class StagingBuffer:
    """One batch at a time: `start` begins the next one in the place of the last."""

    def __init__(self, ring: RingMemory, memory: mmap.mmap) -> None:
        """Use `staging_for`."""
        self._ring = ring
        self._memory = memory
        self._used = 0

    def start(self) -> Empty:
        """Wait until the last batch has left for the GPU; then where the arrays of the next one are made."""
        self._ring.wait()
        self._used = 0
        return self._empty

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        count = int(np.prod(shape))
        at = self._used
        end = at + count * dtype.itemsize
        if end > len(self._memory):
            # Sized for the worst case, so never; but ordinary memory gives the same batch.
            return np.empty(shape, dtype)
        self._used = _aligned(end)
        return np.frombuffer(self._memory, dtype, count, at).reshape(shape)


def staging_for(ring: RingMemory, columns: Sequence[Column], num_rows: int) -> StagingBuffer | None:
    """A buffer for batches of `num_rows`, registered; None when it would be too large or the driver refuses."""
    num_bytes = sum(map(_aligned, _part_bytes(columns, num_rows))) + _ALIGNMENT
    if num_bytes > MAX_BYTES:
        log.info("a batch takes up to %d MiB: too much to page-lock", num_bytes // 2**20)
        return None
    # Shared, although with nobody: after a fork, writes to a private mapping go to pages that the driver does not know.
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
    return StagingBuffer(ring, memory) if ring.register(address, num_bytes) else None


def _part_bytes(columns: Sequence[Column], num_rows: int) -> list[int]:
    parts = []
    for column in columns:
        if column.kind in ("ragged", "text"):
            parts.append(4 * (num_rows + 1))
            parts.append(num_rows * (column.max_row_bytes - 4))
        else:
            parts.append(num_rows * column.max_row_bytes)
    return parts


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

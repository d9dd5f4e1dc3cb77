"""The sidecar's memory on a shared GPU: taken whole before READY, constant until the end, capped twice, proven.

vLLM measures the GPU while it starts: memory that the sidecar takes then is charged to vLLM, memory that it gives
back then aborts vLLM's start. So the allocator of PyTorch gets everything at once and never asks the driver again:

    limit (MPS)  = context of CUDA + pool + slack
    pool         = large segment + small segments, all cached by PyTorch's allocator
    cap (PyTorch) = pool

The allocator gives a segment back to the driver only when no tensor lives in it, and it does that when it is about
to fail. A tiny tensor, an anchor, in each segment prevents it: an out-of-memory error leaves the pool as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mps_trainer.errors import PlacementError
from mps_trainer.sidecar.gpu.driver import allocate_raw, free_raw, memory_info

MIB = 2**20
# PyTorch keeps tensors of up to 1 MiB in segments of 2 MiB, apart from the large ones.
_SMALL_SEGMENT = 2 * MIB
_SMALL_TENSOR = MIB
_LARGE_ANCHOR = 2 * MIB
_SMALL_ANCHOR = 512
SMALL_POOL = 64 * MIB
#: What later batches may need beyond what the worst-case step held of small tensors.
_SMALL_MORE = 1.25
_PROBE_STEP = 64 * MIB


@dataclass(frozen=True)
class ReservationReport:
    """What was taken and what was proven. All sizes in bytes.

    Attributes:
        limit: what MPS allows the process, its context included; 0 without MPS.
        pool: what PyTorch's allocator holds and is capped at.
        left: what is left of the limit beside the pool.
        refused: the smallest attempt to exceed the limit, which was refused; 0 without MPS.
    """

    limit: int
    pool: int
    left: int
    refused: int


class Reservation:
    """Device memory of one process. Use `take` once, after the dry step has loaded every kernel."""

    def __init__(self, report: ReservationReport, anchors: list[Tensor]) -> None:
        self.report = report
        self._anchors = anchors

    @classmethod
    def take(cls, device: torch.device, pool_bytes: int, limit_bytes: int = 0, small_bytes: int = 0) -> Reservation:
        """Fill the pool, cap it, and prove the limit by trying to exceed it.

        Args:
            device: the CUDA device; its context exists already.
            pool_bytes: what tensors may take; what PyTorch holds already counts.
            limit_bytes: the MPS limit of this process; 0 without MPS, then nothing but PyTorch's cap is claimed.
            small_bytes: what the dry step held in segments of small tensors; adapters and their optimizer take
                hundreds of MiB there, which the large segment cannot give.

        Raises:
            PlacementError: the limit was dropped by MPS, does not hold, or has no room for the pool.
        """
        total = memory_info()[1]
        if limit_bytes:
            _check_limit_is_there(limit_bytes)
        torch.cuda.empty_cache()
        anchors = _fill(device, pool_bytes, max(SMALL_POOL, int(_SMALL_MORE * small_bytes)))
        held = torch.cuda.memory_reserved(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, held / total), device)
        refused = _prove(limit_bytes) if limit_bytes else 0
        return cls(ReservationReport(limit_bytes, held, memory_info()[0] if limit_bytes else 0, refused), anchors)

    def check_constant(self, device: torch.device) -> None:
        """PlacementError when PyTorch holds another amount than at the start."""
        now = torch.cuda.memory_reserved(device)
        if now != self.report.pool:
            raise PlacementError(
                f"the reservation changed from {self.report.pool} to {now} bytes",
                "this is a bug of mps-trainer: vLLM may have mismeasured its memory; report it with sidecar.log",
            )


def _check_limit_is_there(limit_bytes: int) -> None:
    # MPS drops every limit without a word when an entry names a GPU that the process cannot see. The limit shows
    # only in `free`, which stays below it; a full GPU shows the same, so this finds a drop and proves nothing.
    free, _ = memory_info()
    if free > limit_bytes:
        raise PlacementError(
            f"MPS does not enforce the memory limit of {limit_bytes // MIB} MiB: {free // MIB} MiB are free to "
            "this process",
            "the limit must name this GPU by its full UUID and nothing else; is the process an MPS client at all?",
        )


def small_peak(device: torch.device) -> int:
    """The most bytes that PyTorch held in segments of small tensors since the peaks were reset."""
    return int(torch.cuda.memory_stats(device).get("reserved_bytes.small_pool.peak", 0))


def _fill(device: torch.device, pool_bytes: int, small_bytes: int) -> list[Tensor]:
    anchors: list[Tensor] = []
    try:
        small = [_bytes(_SMALL_TENSOR, device) for _ in range(small_bytes // _SMALL_SEGMENT * 2)]
        # Two tensors fill a segment. The first of each pair gives way to an anchor and a filler: without the filler
        # the allocator would put the next anchor into the same gap, and its own segment would have none.
        for i in range(0, len(small), 2):
            small[i] = torch.empty(0)
            anchors.append(_bytes(_SMALL_ANCHOR, device))
            small[i] = _bytes(_SMALL_TENSOR - _SMALL_ANCHOR, device)
        del small
        rest = pool_bytes - torch.cuda.memory_reserved(device)
        if rest >= _LARGE_ANCHOR:
            large = _bytes(rest // _SMALL_SEGMENT * _SMALL_SEGMENT, device)
            del large
            anchors.append(_bytes(_LARGE_ANCHOR, device))
    except torch.OutOfMemoryError:
        free = memory_info()[0]
        raise PlacementError(
            f"the reservation of {pool_bytes // MIB} MiB does not fit: {torch.cuda.memory_reserved(device) // MIB} "
            f"MiB are held and {free // MIB} MiB are free to this process",
            "lower `memory`, or find out who else is on the GPU with `mps-trainer doctor`",
        ) from None
    return anchors


def _bytes(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _prove(limit_bytes: int) -> int:
    # The smallest step over what is left must fail. Should it succeed, it is given back at once.
    left = memory_info()[0]
    attempt = left + _PROBE_STEP
    address = allocate_raw(attempt)
    if address is None:
        return attempt
    free_raw(address)
    raise PlacementError(
        f"the MPS limit of {limit_bytes // MIB} MiB does not hold: {attempt // MIB} MiB more could be taken",
        "report this with the driver's version; use mps: off on a GPU of its own until then",
    )

"""For `gpu_step_shapes.py`: few operations in flight without waiting for each of them.

`CUDA_LAUNCH_BLOCKING` bounds what a kill finds on the GPU to one kernel, and pays a round trip for every kernel. Eight
kernels of 0.2 ms in flight killed no neighbour either (docs/results/gpu_fault_drill.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _FewInFlight(TorchDispatchMode):
    """After each half of `most` operations it waits for the half before."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._half = max(1, most // 2)
        self._count = 0
        self._last: Any = None
        self._cuda = torch.cuda.is_available()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        self._count += 1
        if self._count >= self._half:
            self._count = 0
            self._turn()
        return found

    def _turn(self) -> None:
        before, self._last = self._last, None
        if self._cuda:
            self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last.record()
        if before is not None:
            before.synchronize()


@contextmanager
def few_in_flight(most: int) -> Iterator[None]:
    """At most `most` operations of PyTorch in flight; backward runs in the calling thread, which the mode sees."""
    with torch.autograd.set_multithreading_enabled(False), _FewInFlight(most):
        yield

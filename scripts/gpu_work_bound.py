"""A trainer that may queue more than one step: how much may be in flight, tried by the drills.

The sidecar itself needs none of it: it reads the loss and waits for the device in each step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

BOUND_MS = 20.0
_MAX_DEPTH = 8


class WorkBound:
    """Keeps at most `bound_ms` of this process's steps queued on the GPU.

    Call `step_done` after the kernels of each step are launched: it waits until few enough of them are left. The
    depth follows from the measured length of a step; a step that is longer than the bound is waited for itself.
    """

    def __init__(self, device: torch.device, bound_ms: float = BOUND_MS) -> None:
        self._device = device
        self._bound_ms = bound_ms
        self._events: deque[torch.cuda.Event] = deque()
        self._last: torch.cuda.Event | None = None
        self.step_ms = bound_ms  # as long as no step is measured, a step counts as long

    @property
    def depth(self) -> int:
        """Steps that may be queued now, at least 1: that one is waited for."""
        return max(1, min(_MAX_DEPTH, int(self._bound_ms / max(self.step_ms, 1e-3))))

    def step_done(self) -> None:
        """Record the end of a step and wait until at most `depth` - 1 steps are unfinished."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        while len(self._events) >= self.depth:
            done = self._events.popleft()
            done.synchronize()
            self._measure(done)

    def drain(self) -> None:
        """Wait for everything that this process has queued."""
        torch.cuda.synchronize(self._device)
        self._events.clear()
        self._last = None

    def _measure(self, done: torch.cuda.Event) -> None:
        # Between two ends lies one step and any idle time, so this errs to the safe side: too long.
        if self._last is not None:
            elapsed = self._last.elapsed_time(done)
            self.step_ms = elapsed if self.step_ms >= self._bound_ms else 0.8 * self.step_ms + 0.2 * elapsed
        self._last = done


def measure_step_ms(step: Callable[[], None], device: torch.device, repeats: int = 3) -> float:
    """Milliseconds of one step, the shortest of a few, kernels included."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - started))
    return min(times)

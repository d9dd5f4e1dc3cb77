"""How a client of MPS ends without taking its neighbours along.

A process that ends with much work queued on the GPU kills the processes beside it, whether it was a signal, an
exception or a plain return that ended it. Two rules prevent that:

* the work in flight is bounded, in milliseconds (`WorkBound`), so that even SIGKILL finds next to nothing;
* every way out that runs any Python synchronises first (`SafeEnd`).

What no code of ours can catch, SIGKILL and a crash of the interpreter, is left to the bound.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

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


class SafeEnd:
    """Synchronises on every way out of a process: return, exception, `sys.exit`, SIGTERM, SIGINT.

        with SafeEnd(device, on_signal=service.stop):
            ...

    `on_signal` is called from the handler and should only set a flag; without it a signal raises SystemExit at the next
    bytecode. With `signals=False` the process has handlers of its own, which lead to a return. Use it in the main
    thread, before the first kernel.
    """

    def __init__(
        self, device: torch.device, on_signal: Callable[[], None] | None = None, *, signals: bool = True
    ) -> None:
        self._device = device
        self._on_signal = on_signal
        self._numbers = (signal.SIGTERM, signal.SIGINT) if signals else ()
        self._before: dict[int, object] = {}

    def __enter__(self) -> SafeEnd:
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._handle)
        # For what ends the interpreter outside of the block, such as an exception in a thread's owner.
        atexit.register(self.synchronise)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.synchronise()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        atexit.unregister(self.synchronise)

    def synchronise(self) -> None:
        """Wait for the GPU. A context that a fault has broken has nothing left to wait for."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._device)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._on_signal is not None:
            self._on_signal()
            return
        self.synchronise()
        raise SystemExit(128 + number)


def shield_from_oom_killer(score: int = -500) -> bool:
    """Ask the kernel to find another victim when memory runs out; False when it does not let us (needs privileges)."""
    try:
        Path("/proc/self/oom_score_adj").write_text(str(score))
    except PermissionError:
        return False
    return True


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

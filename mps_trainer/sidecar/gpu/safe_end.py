"""How a client of MPS ends without taking its neighbours along.

A process that ends with much work queued on the GPU kills the processes beside it, whether it was a signal, an
exception or a plain return that ended it. Two rules prevent that:

* never more than one training step is in flight: `Trainer.train_step` reads the loss and waits for the device, and
  beside an engine every single kernel is waited for (`CUDA_LAUNCH_BLOCKING`), so that even SIGKILL finds next to
  nothing;
* every way out that runs any Python synchronises first (`SafeEnd`).

What no code of ours can catch, SIGKILL and a crash of the interpreter, is left to the first.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
from collections.abc import Callable
from types import FrameType, TracebackType

import torch


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

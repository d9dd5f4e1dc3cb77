"""A record on loan from the ring, and what happens to views that outlive the loan.

The arrays of `Delivery.batch` and the memoryview `Delivery.payload` all keep one array alive, the base of the lease
(numpy and torch tensors made from them keep it too). `release` drops the lease's own references; when the base is
then gone, no view is left and the slot goes back to the operator. When it is not, the slot is *not* given back, so the
views keep showing the same record, and `release` raises: somebody kept a view without copying. The slot goes
back by itself when the last view dies. So a view can cost a slot and an error, but never shows another record.

When the hub closes, a successor lends all that was not released again, and the operator then reuses the slots. Open
deliveries raise from then on; arrays that were taken out of one before keep what they show, because the hub makes their
pages private to this process at its close. The mapping lives until the last of them dies.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mps_trainer.columns import PackedBatch
from mps_trainer.errors import ExperienceError, TransportError
from mps_trainer.transport.arrow import Bytes
from mps_trainer.transport.record import RecordHeader


class Lessor(Protocol):
    """Who lends the slot: the hub's side of one channel. `closed`: it has detached, and the slot may be lent anew."""

    closed: bool

    def free(self, slot: int) -> None:
        """Give the slot back to the operator: the record is acknowledged."""

    def linger(self, slot: int) -> None:
        """Count a slot whose views outlived their delivery."""

    def retire(self, slot: int) -> None:
        """The last view of a lingering slot has died. Runs inside the garbage collector: must only note it."""

    def reply(
        self,
        header: RecordHeader,
        values: npt.NDArray[np.float32],
        model_version: int,
        sidecar_ns: int,
        trained_ns: int,
    ) -> bool:
        """Send scores to the operator."""


class Delivery:
    """One record, leased. A context manager: leaving it releases.

    One that is dropped without a release keeps its slot; the record is not acknowledged, and the next sidecar gets it.

    Attributes:
        header: which record this is; `header.request_id`, `part`, `parts`, `num_rows`, `want_scores`,
        `sent_ns`, `channel`, `seq`.
    """

    __slots__ = (
        "__weakref__", "_base", "_batch", "_claimed_ns", "_held", "_lessor", "_payload", "_readers", "_released",
        "_slot", "header",
    )  # fmt: skip

    def __init__(self, lessor: Lessor, slot: int, header: RecordHeader, base: Bytes, batch: PackedBatch) -> None:
        self.header = header
        self._lessor = lessor
        self._slot = slot
        self._base: weakref.ref[Bytes] = weakref.ref(base)
        # Held until the release; its memoryview is made when somebody asks for it.
        self._held: Bytes | None = base
        self._payload: memoryview | None = None
        self._batch: PackedBatch | None = batch
        self._claimed_ns = time.monotonic_ns()
        self._released = False
        self._readers: list[Callable[[], None]] = []

    @property
    def batch(self) -> PackedBatch:
        """Read-only views of the ring. Copy what is needed after `release`; after it this raises TransportError."""
        if self._batch is None or self._lessor.closed:
            raise self._gone()
        return self._batch

    @property
    def payload(self) -> memoryview:
        """The record's bytes, read-only: one Arrow record batch message. After `release` this raises TransportError."""
        if self._held is None or self._lessor.closed:
            raise self._gone()
        if self._payload is None:
            self._payload = memoryview(self._held)  # type: ignore[arg-type]
        return self._payload

    def reply(self, values: npt.NDArray[Any], model_version: int, trained_ns: int = 0) -> bool:
        """Send the scores of this part's rows, float32 (num_rows,). May be called after `release`.

        `trained_ns`: CLOCK_MONOTONIC when the model last took a training step; 0 when that is not known.
        False when the operator is dead or stopped. Raises ExperienceError for another type or length.
        """
        if values.shape != (self.header.num_rows,) or values.dtype != np.float32:
            raise ExperienceError(
                f"reply of {values.dtype}{list(values.shape)} to {self.header.num_rows} rows", "reply one float32 a row"
            )
        sidecar_ns = time.monotonic_ns() - self._claimed_ns
        return self._lessor.reply(self.header, values, model_version, sidecar_ns, trained_ns)

    def hold_until(self, done: Callable[[], None]) -> None:
        """Let every way of release call `done` first: it returns when a device reads the slot no more.

        When it raises, the slot is not given back: a successor gets the record again.
        """
        self._readers.append(done)

    def release(self) -> None:
        """Acknowledge the record and give its slot back. Idempotent.

        Raises TransportError when a view of it is still alive; the slot then goes back when the last view dies.
        """
        if not self._release():
            raise TransportError(
                f"views of record {self.header.seq} of {self.header.channel} outlive its delivery",
                "copy what you keep (numpy's copy(), torch's clone()) and drop or `del` the views before the release",
            )

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The traceback of an error on its way keeps views alive; it must not be replaced by ours.
        if error is None:
            self.release()
        else:
            self._release()

    def _release(self) -> bool:
        if self._released:
            return True
        while self._readers:
            self._readers[-1]()
            self._readers.pop()
        self._released = True
        # The memoryview is not released by force: `torch.frombuffer` keeps one without an export that would show.
        self._payload = self._batch = self._held = None
        if self._base() is not None:
            gc.collect()
        base = self._base()
        if base is None:
            self._lessor.free(self._slot)
            return True
        self._lessor.linger(self._slot)
        weakref.finalize(base, self._lessor.retire, self._slot).atexit = False
        return False

    def _gone(self) -> TransportError:
        if self._batch is not None:
            return TransportError(
                f"record {self.header.seq} of {self.header.channel} belongs to a closed hub",
                "take what you need before the hub closes; a successor gets the record again",
            )
        return TransportError(
            f"record {self.header.seq} of {self.header.channel} was released", "copy what you need before the release"
        )

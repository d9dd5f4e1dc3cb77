"""The reader's process of `gpu_intake.py`: a hub, the decoder and `RingMemory`, as in the sidecar, and the checks."""

from __future__ import annotations

import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

from gpu_intake_writer import ROWS, TOKENS, WIDTHS, columns

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import MpsFolder

BUSY_CYCLES = 60_000_000
NOWHERE = 0x10000
DEVICE = "cuda:0"


class Reader:
    """A hub whose records go to the GPU."""

    def __init__(self, run_id: str, width: int, cuda: Any = None) -> None:
        import torch

        from mps_trainer.sidecar.gpu.ring_memory import RingMemory

        self.torch = torch
        self.device = torch.device(DEVICE)
        self.ring = RingMemory(self.device, cuda)
        self._run_id, self._width = run_id, width
        self._hub: Any = None

    def open(self, *, register: bool) -> dict[str, float]:
        """Attach; what it took."""
        from mps_trainer.sidecar.gpu.driver import memory_info
        from mps_trainer.transport import SidecarHub

        free, begin = memory_info()[0], time.perf_counter()
        self._hub = SidecarHub(
            self._run_id, columns(self._width), on_attach=self.ring.attach if register else None, attach_timeout_s=5
        )
        seconds, taken = time.perf_counter() - begin, free - memory_info()[0]
        if not self._hub.wait(20):
            raise RuntimeError("no record came within 20 s")
        segments = self._hub.segments()
        return {"segment, bytes": segments[0].nbytes, "device memory, bytes": taken, "seconds": seconds}

    def take(self) -> Any:
        """The next record."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            delivery = self._hub.receive()
            if delivery is not None:
                return delivery
            self._hub.wait(1)
        raise RuntimeError("no record came within 10 s")

    def measure(self, count: int) -> dict[str, Any]:
        """Time and check `count` records."""
        found: dict[str, list[float]] = {"largest column": [], "all columns": [], "batch, wall clock": []}
        wrong = 0
        for _ in range(count):
            delivery = self.take()
            delivery.hold_until(self.ring.wait)
            packed = delivery.batch
            arrays = [packed["feature"].values]
            found["largest column"].append(self._rate(arrays))
            arrays += [c.values for n, c in packed.columns.items() if not c.is_text and n != "feature"]
            arrays.append(packed["tokens"].offsets)
            found["all columns"].append(self._rate(arrays))
            self.torch.cuda.synchronize()
            begin = time.perf_counter()
            batch = self.ring.batch(packed)
            self.ring.wait()
            seconds = time.perf_counter() - begin
            found["batch, wall clock"].append(sum(a.nbytes for a in arrays) / seconds / 1e9)
            del packed, arrays
            delivery.release()
            wrong += not self.is_right(batch, delivery.header.request_id)
        return {"records": count, "wrong": wrong, **{f"{name}, GB/s": _spread(v) for name, v in found.items()}}

    def race(self, count: int, *, early: bool) -> dict[str, Any]:
        """Copies that start late while the writer waits for the slot. `early` releases as nobody should."""
        wrong = 0
        for _ in range(count):
            delivery = self.take()
            self.torch.cuda._sleep(BUSY_CYCLES)
            batch = self.ring.batch(delivery.batch)
            if not early:
                delivery.hold_until(self.ring.wait)
            delivery.release()
            self.ring.wait()
            wrong += not self.is_right(batch, delivery.header.request_id)
        return {"records": count, "wrong": wrong}

    def is_right(self, batch: Any, number: int) -> bool:
        """Every byte of a batch on the GPU, by sums over rows, and that it is this record."""
        torch = self.torch
        tokens = batch.ragged("tokens")
        # Offsets from an overwritten record may be anything; an index out of range would end this process.
        lengths = tokens.lengths.clamp(0, 2 * TOKENS)
        if int(lengths.sum()) != len(tokens.values) or batch.texts["eid"] != [f"{number}/{i}" for i in range(ROWS)]:
            return False
        rows = torch.repeat_interleave(torch.arange(ROWS, device=self.device), lengths)
        token_sum = torch.zeros(ROWS, dtype=torch.int64, device=self.device)
        token_sum.index_add_(0, rows, tokens.values.long())
        reward = batch["reward"]
        right = (
            (batch["feature"].sum(1, dtype=torch.int64) == batch["feature_sum"])
            & (batch["number"] == number)
            & (token_sum == batch["token_sum"])
            & (reward >= 0)
            & (reward < 1)
        )
        return bool(right.all())

    def close(self) -> None:
        """Detach, as for a successor."""
        self._hub.close(unlink=False)
        self.ring.close()

    def end(self, stop: Path) -> None:
        """Let the writer end, and leave nothing."""
        stop.touch()
        deadline = time.monotonic() + 10
        while any(producer.alive for producer in self._hub.producers()) and time.monotonic() < deadline:
            delivery = self._hub.receive()
            if delivery is not None:
                delivery.release()
            self._hub.wait(0.2)
        self._hub.close(unlink=True)
        self.ring.close()

    def _rate(self, arrays: list[Any]) -> float:
        torch = self.torch
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        copies = [self.ring.to_device(array) for array in arrays]
        stop.record()
        stop.synchronize()
        del copies
        return sum(array.nbytes for array in arrays) / start.elapsed_time(stop) / 1e6


def read(run_ids: dict[str, str], stop: str, mps_folder: str, full: bool) -> dict[str, Any]:
    """The sidecar's process: the phases for each size."""
    import torch

    torch.zeros(1, device=DEVICE)
    is_client = bool(mps_folder) and MpsDaemon(MpsFolder(Path(mps_folder))).is_client(os.getpid())
    results: dict[str, Any] = {"is an MPS client": is_client}
    for size, run_id in run_ids.items():
        results[size] = _phases(run_id, WIDTHS[size], Path(f"{stop}-{run_id}"), full)
    return results


def _phases(run_id: str, width: int, stop: Path, full: bool) -> dict[str, Any]:
    plain = Reader(run_id, width)
    plain.open(register=False)
    found: dict[str, Any] = {"unregistered": plain.measure(15)}
    plain.close()
    if full:
        found["refused"] = _refused(run_id, width)
    reader = Reader(run_id, width)
    found["registered"] = {"attaching": reader.open(register=True), "accepted": reader.ring.registered}
    found["registered"] |= reader.measure(40)
    if full:
        found["busy stream"] = reader.race(15, early=False)
        found["released early"] = reader.race(15, early=True)
        found["after that"] = reader.race(5, early=False)
    reader.end(stop)
    return found


def _refused(run_id: str, width: int) -> dict[str, Any]:
    import torch

    from mps_trainer.sidecar.gpu.ring_memory import RealCuda

    class AskingForNothing(RealCuda):
        status = 0

        def register(self, address: int, num_bytes: int) -> int:
            self.status = super().register(NOWHERE, num_bytes)
            return self.status

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines(logging.WARNING)
    logging.getLogger("mps_trainer").addHandler(handler)
    cuda = AskingForNothing(torch.device(DEVICE))
    reader = Reader(run_id, width, cuda)
    reader.open(register=True)
    # What the refusal may have left behind would show in the next launch.
    launches = int(torch.ones(1000, device=DEVICE).sum()) == 1000
    found = {"status": cuda.status, "accepted": reader.ring.registered, "a kernel runs": launches, **reader.measure(10)}
    reader.close()
    logging.getLogger("mps_trainer").removeHandler(handler)
    return {**found, "lines": lines}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}

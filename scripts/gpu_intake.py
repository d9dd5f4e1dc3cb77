#!/usr/bin/env python3
"""From an operator's process through the ring to the GPU: how fast, and is every byte right?

    python scripts/gpu_intake.py [--mps both|on|off] [--out docs/results/gpu_intake.json]

A writer process sends records as fast as there is room, so that a slot that is given back is overwritten at once. Each
record is different, with checksums of its own. The reader is what the sidecar is: a hub, the decoder, `RingMemory`. It
checks every record on the GPU. The phases:

    unregistered       the mapping as it is
    registered         page-locked
    busy stream        page-locked, and the copies wait behind 30 ms of other work on the stream
    released early     the same, but the slot is released before its copies are done: a control, to find wrong bytes
    refused            the driver refuses (it is asked for an address where nothing is): the fallback, told in one line
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_lab import Job, WarmParent, gpu_uuids, machine

from mps_trainer.columns import IDENTITY_COLUMNS, Column
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import sidecar_env, without_mps
from mps_trainer.mps.folder import MpsFolder
from mps_trainer.transport import OperatorChannel, RingSettings
from mps_trainer.transport.sweep import remove_run

ROWS = 256
# One batch as the transport's benchmark has it (8.4 MB), and one at which launching a copy no longer shows.
WIDTHS = {"8.4 MB": 8192, "67 MB": 65536}
TOKENS = 64
PATTERNS = 5  # prime to the number of slots
SLOTS = 3
WANTED_GB_S = 45.0
BUSY_CYCLES = 60_000_000
NOWHERE = 0x10000
LIMIT_S = 55.0
DEVICE = "cuda:0"


def columns(width: int) -> tuple[Column, ...]:
    return (
        Column(name="feature", source="info.feature", dtype="int32", shape=(width,)),
        *IDENTITY_COLUMNS,
        Column(name="number", source="info.number", dtype="int64"),
        Column(name="feature_sum", source="info.feature_sum", dtype="int64"),
        Column(name="tokens", source="response_tokens", dtype="int32", shape=(None,), maximum=2 * TOKENS),
        Column(name="token_sum", source="info.token_sum", dtype="int64"),
    )


def write(run_id: str, width: int, stop: str) -> dict[str, Any]:
    """The operator's process: no CUDA, no torch."""
    import numpy as np

    patterns = []
    for seed in range(PATTERNS):
        rng = np.random.default_rng(seed)
        feature = rng.integers(-(2**31), 2**31, (ROWS, width), np.int32)
        tokens = [rng.integers(0, 2**31, k, np.int32) for k in rng.integers(0, 2 * TOKENS + 1, ROWS)]
        patterns.append(
            {
                "feature": feature,
                "group": ["g"] * ROWS,
                "reward": rng.random(ROWS, np.float32),
                "feature_sum": feature.sum(1, dtype=np.int64),
                "tokens": tokens,
                "token_sum": np.array([row.sum(dtype=np.int64) for row in tokens]),
            }
        )
    # Twice a row's bytes for the small columns: more than enough.
    ring = RingSettings(num_slots=SLOTS, slot_bytes=ROWS * (4 * width + 2048) + 2**20)
    deadline = time.monotonic() + LIMIT_S
    sent = number = 0
    with OperatorChannel.create(run_id, columns(width), ring, backpressure="block", block_timeout_s=0.5) as channel:
        while not Path(stop).exists() and time.monotonic() < deadline:
            rows = {
                **patterns[number % PATTERNS],
                "eid": [f"{number}/{i}" for i in range(ROWS)],
                "number": np.full(ROWS, number, np.int64),
            }
            sent += channel.send(rows, request_id=number, want_scores=False).parts_sent
            number += 1
    return {"records sent": sent}


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


def _run(parent: WarmParent, who: str, env: dict[str, str], mps_folder: str, folder: Path) -> dict[str, Any]:
    run_ids = {size: secrets.token_hex(4) for size in WIDTHS}
    stop = str(folder / "stop")
    nothing = {**without_mps({}), "CUDA_VISIBLE_DEVICES": ""}
    writers: list[Job] = [
        parent.start("gpu_intake:write", run_id, WIDTHS[size], f"{stop}-{run_id}", env=nothing)
        for size, run_id in run_ids.items()
    ]
    try:
        full = "CUDA_LAUNCH_BLOCKING" not in env
        result: dict[str, Any] = parent.start("gpu_intake:read", run_ids, stop, mps_folder, full, env=env).result(50)
    finally:
        for run_id in run_ids.values():
            Path(f"{stop}-{run_id}").touch()
        sent = [writer.result(10) for writer in writers]
        for run_id in run_ids.values():
            remove_run(run_id)
    print(who, json.dumps({**result, "writers": sent}), flush=True)
    return result


def _complaints(who: str, result: dict[str, Any]) -> list[str]:
    found = []
    if result["is an MPS client"] != ("MPS client" in who):
        found.append(f"{who}: is an MPS client: {result['is an MPS client']}")
    for size in WIDTHS:
        phases = result[size]
        for name, phase in phases.items():
            if isinstance(phase, dict) and name != "released early" and phase["wrong"]:
                found.append(f"{who}, {size}, {name}: {phase['wrong']} of {phase['records']} records are wrong")
        if not phases["registered"]["accepted"]:
            found.append(f"{who}, {size}: not registered")
        if "refused" in phases:
            refused = phases["refused"]
            told = len(refused["lines"]) == 1 and "ulimit -l" in refused["lines"][0]
            if refused["status"] == 0 or refused["accepted"] or not refused["a kernel runs"] or not told:
                found.append(f"{who}, {size}: the refusal: {refused}")
    rate = result["67 MB"]["registered"]["largest column, GB/s"]["median"]
    if rate < WANTED_GB_S:
        found.append(f"{who}: {rate:.1f} GB/s at 67 MB, wanted {WANTED_GB_S:g}")
    return found


def _table(results: dict[str, Any]) -> None:
    print("| who, how much | what | unregistered GB/s | refused | registered |")
    print("|---|---|---|---|---|")
    for who, result in results.items():
        for size in WIDTHS:
            for what in ("largest column, GB/s", "all columns, GB/s", "batch, wall clock, GB/s"):
                cells = []
                for phase in ("unregistered", "refused", "registered"):
                    found = result[size].get(phase)
                    cells.append(
                        "{median:.1f} ({lowest:.1f} to {highest:.1f})".format(**found[what]) if found else "not tried"
                    )
                print(f"| {who}, {size} | {what.removesuffix(', GB/s')} | {' | '.join(cells)} |")
            if "released early" in result[size]:
                late, early = result[size]["busy stream"], result[size]["released early"]
                shown = "" if early["wrong"] else ": the control could not show what an early release does"
                print(
                    f"{who}, {size}: behind a busy stream {late['wrong']} of {late['records']} records wrong, released "
                    f"early {early['wrong']} of {early['records']}{shown}"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mps", choices=("both", "on", "off"), default="both")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    uuid = gpu_uuids()[0]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mt-") as name, WarmParent(Path(name) / "log") as parent:
        folder = Path(name)
        if args.mps in ("both", "on"):
            daemon = MpsDaemon(MpsFolder(folder / "m"))
            daemon.start()
            try:
                client = sidecar_env(daemon.folder.pipe_dir, uuid, 8 * 2**30)
                results["MPS client"] = _run(parent, "MPS client", client, str(folder / "m"), folder)
                # As the sidecar runs: see docs/mps.md.
                who = "MPS client, blocking launches"
                results[who] = _run(parent, who, {**client, "CUDA_LAUNCH_BLOCKING": "1"}, str(folder / "m"), folder)
            finally:
                daemon.quit(force_after_s=5)
        if args.mps in ("both", "off"):
            alone = {**without_mps({}), "CUDA_VISIBLE_DEVICES": uuid}
            results["no MPS"] = _run(parent, "no MPS", alone, "", folder)
    _table(results)
    complaints = [line for who, result in results.items() for line in _complaints(who, result)]
    for line in complaints:
        print(line)
    if args.out:
        args.out.write_text(
            json.dumps({"machine": machine(), "results": results, "as wanted": not complaints}, indent=1)
        )
    print("as wanted:", not complaints)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

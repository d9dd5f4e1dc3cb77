#!/usr/bin/env python3
"""May a low-priority MPS client put a short piece of work before its neighbour's, by a stream of high priority?

    python scripts/gpu_stream_priority.py [--repeats 150] [--out RESULT.json]

A neighbour of normal priority multiplies large matrices without a pause, as an engine that computes prompts does. A
client runs a short forward pass (ten bf16 products, 2048 rows) again and again, each waited for: of normal or low
priority (CUDA_MPS_CLIENT_PRIORITY), on streams of priority 0, -1, ... Milliseconds of a pass, and what is left of the
neighbour's speed. About 30 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_jobs import Counter, WarmParent
from gpu_lab import gpu_uuids, machine

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import sidecar_env
from mps_trainer.mps.folder import MpsFolder

GIB = 2**30
WARM_PASSES = 20


def neighbour(path: str) -> None:
    """Multiply 8192 x 8192 matrices until it is told to stop; eight are in the queue at a time."""
    import torch

    counter = Counter(Path(path))
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    events = []
    while not counter.stopping:
        a @ a
        events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        events[-1].record()
        if len(events) >= 8:
            events.pop(0).synchronize()
            counter.tick(0)
    torch.cuda.synchronize()


def passes(path: str, repeats: int) -> dict[str, Any]:
    """For each priority of a stream: milliseconds of a pass, and the neighbour's products per second meanwhile."""
    import torch

    counter = Counter(Path(path))
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32
    found: dict[str, Any] = {}
    for priority in (0, -1, -2, -3):
        stream = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
        times = []
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), torch.inference_mode():
            for i in range(WARM_PASSES + repeats):
                if i == WARM_PASSES:
                    begin, products = time.monotonic(), counter.value
                start = time.perf_counter()
                y = x
                for _ in range(10):
                    y = torch.relu(y @ weight)
                stream.synchronize()
                times.append((time.perf_counter() - start) * 1e3)
        seconds = time.monotonic() - begin
        times = sorted(times[WARM_PASSES:])
        found[str(stream.priority)] = {
            "p50, ms": times[len(times) // 2], "p99, ms": times[int(len(times) * 0.99)],
            "neighbour, products/s": (counter.value - products) / seconds,
        }  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=150)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    (uuid, *_) = gpu_uuids()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name, WarmParent(Path(name) / "log") as parent:
        daemon = MpsDaemon(MpsFolder(Path(name) / "m"))
        daemon.start()
        try:
            pipe = daemon.folder.pipe_dir
            counter = Counter(Path(name) / "count")
            beside = parent.start("gpu_stream_priority:neighbour", str(counter.path), env=sidecar_env(
                pipe, uuid, 8 * GIB, priority=0))  # fmt: skip
            if not counter.wait_for(100, 60, beside):
                raise RuntimeError("the neighbour does not compute")
            begin, products = time.monotonic(), counter.value
            counter.wait_for(products + 500, 20, beside)
            found["neighbour alone, products/s"] = (counter.value - products) / (time.monotonic() - begin)
            for client, priority in (("normal client", 0), ("low client", 1)):
                env = sidecar_env(pipe, uuid, 4 * GIB, priority=priority)
                job = parent.start("gpu_stream_priority:passes", str(counter.path), args.repeats, env=env)
                found[client] = job.result(90)
                print(client, json.dumps(found[client], indent=1), flush=True)
            counter.stop()
            beside.wait(20)
        finally:
            daemon.quit(force_after_s=5)
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), **found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

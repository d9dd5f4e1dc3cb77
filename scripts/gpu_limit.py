#!/usr/bin/env python3
"""Does the memory limit hold, is a dropped one noticed, and does the reservation stay constant?

    python scripts/gpu_limit.py [--out docs/results/gpu_limit.json]

A neighbour works on the same GPU all the while and checks its results.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_jobs import Counter, WarmParent
from gpu_lab import gpu_uuids, machine

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import LIMIT_VARIABLE, sidecar_env
from mps_trainer.mps.folder import MpsFolder

GIB, MIB = 2**30, 2**20
LIMIT, POOL = 4 * GIB, 3 * GIB


def reserve(limit: int, pool: int) -> dict[str, Any]:
    """Take a reservation, run into its end in several ways, and say whether it stayed as it was."""
    import time

    import torch

    from mps_trainer.sidecar.gpu.driver import memory_info
    from mps_trainer.sidecar.gpu.reservation import Reservation

    device = torch.device("cuda:0")
    torch.zeros(1, device=device)
    free_at_start, total = memory_info()
    started = time.perf_counter()
    reservation = Reservation.take(device, pool, limit)
    seconds = time.perf_counter() - started
    free_before = memory_info()[0]
    oom = 0
    for size in (2 * pool, pool, pool - 256 * MIB, 100 * MIB, 3 * MIB, 1000):
        held = []
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device=device))
                if len(held) > 200_000:
                    break
        except torch.OutOfMemoryError:
            oom += 1
        del held
        torch.cuda.empty_cache()
        reservation.check_constant(device)
    return {
        "free at start": free_at_start,
        "total": total,
        "context": limit - free_at_start,
        "pool": reservation.report.pool,
        "left": reservation.report.left,
        "refused": reservation.report.refused,
        "out of memory, raised in the caller": oom,
        "change of free memory over all that": memory_info()[0] - free_before,
        "seconds": seconds,
    }


def neighbour(path: str) -> None:
    from gpu_drill_victim import victim

    victim(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    uuids = gpu_uuids()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mt-") as name, WarmParent(Path(name) / "log") as parent:
        daemon = MpsDaemon(MpsFolder(Path(name) / "m"))
        daemon.start()
        counter = Counter(Path(name) / "victim")
        base = sidecar_env(daemon.folder.pipe_dir, uuids[0], LIMIT)
        no_limit = {key: value for key, value in base.items() if key != LIMIT_VARIABLE}
        watched = parent.start("gpu_limit:neighbour", str(counter.path), env=no_limit)
        counter.wait_for(5, 60)
        cases = {
            "one entry, the full UUID": base,
            "an entry for a GPU that the process cannot see": {**base, LIMIT_VARIABLE: f"{base[LIMIT_VARIABLE]},7=2G"},
            "an entry for an unknown name": {**base, LIMIT_VARIABLE: "bogus=2G"},
            "a wrong pipe directory (no client at all)": {**base, "CUDA_MPS_PIPE_DIRECTORY": name},
        }
        for case, env in cases.items():
            try:
                results[case] = parent.start("gpu_limit:reserve", LIMIT, POOL, env=env).result(120)
            except RuntimeError as error:
                results[case] = str(error)
            print(case, "->", results[case], flush=True)
        before = counter.value
        counter.wait_for(before + 50, 30)
        results["the neighbour"] = {"iterations": counter.value, "wrong results": counter.errors}
        print("the neighbour ->", results["the neighbour"], flush=True)
        counter.stop()
        watched.wait(30)
        daemon.quit(force_after_s=5)
    first = results["one entry, the full UUID"]
    right = (
        isinstance(first, dict)
        and first["change of free memory over all that"] == 0
        and all("does not enforce" in str(results[case]) for case in list(cases)[1:])
        and results["the neighbour"]["wrong results"] == 0
    )
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "results": results, "as wanted": right}, indent=1))
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

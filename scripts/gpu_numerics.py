#!/usr/bin/env python3
"""Does the numerics check find the shares of the SMs under which products are wrong, and only those?

    python scripts/gpu_numerics.py [--repeats 5] [--out RESULT.json]
    python scripts/gpu_numerics.py --map [--out RESULT.json]      # every share from 10 to 100 %, 378 shapes each

Each share runs in processes of its own, under a daemon of its own, several times with other random inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_lab import WarmParent, gpu_uuids, machine

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import sidecar_env
from mps_trainer.mps.folder import MpsFolder

BAD, GOOD = (20, 40, 70), (100, 90, 50, 25, 10)


def check(seed: int) -> dict[str, Any]:
    import torch

    from mps_trainer.sidecar.gpu.numerics import check_numerics

    device = torch.device("cuda:0")
    torch.zeros(1, device=device)
    report = check_numerics(device, seed)
    again = check_numerics(device, seed + 1000)
    return {
        "sms": report.multiprocessors,
        "cases": report.cases,
        "wrong": len(report.wrong),
        "first": report.wrong[:2],
        "seconds": report.seconds,
        "seconds_warm": again.seconds,
        "wrong_again": len(again.wrong),
    }


def gaps() -> dict[str, Any]:
    """Shapes of bf16 products, of a grid of 378, of which a part of the output is never written."""
    import torch

    device = torch.device("cuda:0")
    data = torch.randn(8192 * 8192, device=device, dtype=torch.bfloat16)
    found = []
    for m in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        for n in (256, 512, 1024, 2048, 3584, 4096, 8192):
            for k in (256, 1024, 4096):
                for layout in ("NN", "NT"):
                    a = data[: m * k].view(m, k)
                    b = data[: k * n].view(k, n) if layout == "NN" else data[: k * n].view(n, k).t()
                    out = torch.full((m, n), float("nan"), device=device, dtype=torch.bfloat16)
                    torch.matmul(a, b, out=out)
                    unwritten = int(out.isnan().sum())
                    if unwritten:
                        found.append([m, n, k, layout, round(unwritten / out.numel(), 4)])
    return {"sms": torch.cuda.get_device_properties(device).multi_processor_count, "gaps": found}


def map_shares(out: Path | None) -> int:
    """Every share in a process of its own, six at a time."""
    rows: dict[int, dict[str, Any]] = {}
    uuid = gpu_uuids()[0]
    with tempfile.TemporaryDirectory(prefix="mt-") as folder, WarmParent(Path(folder) / "log") as parent:
        daemon = MpsDaemon(MpsFolder(Path(folder) / "m"))
        daemon.start()
        for first in range(10, 101, 6):
            envs = {
                s: sidecar_env(daemon.folder.pipe_dir, uuid, 6 * 2**30, s) for s in range(first, min(first + 6, 101))
            }
            jobs = {share: parent.start("gpu_numerics:gaps", env=env) for share, env in envs.items()}
            rows |= {share: job.result(60) for share, job in jobs.items()}
        daemon.quit(force_after_s=5)
    print("share: SMs, shapes with gaps of 378")
    print("; ".join(f"{share}: {row['sms']}, {len(row['gaps'])}" for share, row in rows.items()))
    if out:
        out.write_text(json.dumps({"machine": machine(), "shares": rows}))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shares", type=int, nargs="*", default=[*GOOD, *BAD, 30, 60, 80])
    parser.add_argument("--map", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.map:
        return map_shares(args.out)
    uuid = gpu_uuids()[0]
    rows: dict[int, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="mt-") as folder, WarmParent(Path(folder) / "log") as parent:
        daemon = MpsDaemon(MpsFolder(Path(folder) / "m"))
        daemon.start()
        try:
            for share in args.shares:
                env = sidecar_env(daemon.folder.pipe_dir, uuid, 8 * 2**30, share)
                jobs = [parent.start("gpu_numerics:check", seed, env=env) for seed in range(args.repeats)]
                rows[share] = [job.result(120) for job in jobs]
                print(
                    share, [(r["sms"], r["wrong"], r["cases"], round(r["seconds"], 2)) for r in rows[share]], flush=True
                )
        finally:
            daemon.quit(force_after_s=5)
    found = {share: sum(r["wrong"] > 0 for r in runs) for share, runs in rows.items()}
    print("| share | SMs | runs that raise an alarm | wrong cases, of how many | seconds, first and warm |")
    print("|---|---|---|---|---|")
    for share, runs in rows.items():
        wrong, first, warm = ([r[key] for r in runs] for key in ("wrong", "seconds", "seconds_warm"))
        print(
            f"| {share} | {runs[0]['sms']} | {found[share]} of {len(runs)} | {min(wrong)} to {max(wrong)} of "
            f"{runs[0]['cases']} | {min(first):.2f} to {max(first):.2f}, {min(warm):.2f} to {max(warm):.2f} |"
        )
    right = all(found[s] == args.repeats for s in BAD if s in found) and not any(found[s] for s in GOOD if s in found)
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "shares": rows, "as wanted": right}, indent=1))
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

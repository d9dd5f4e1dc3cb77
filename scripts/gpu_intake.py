#!/usr/bin/env python3
"""From an operator's process through the ring to the GPU: how fast, and is every byte right?

    python scripts/gpu_intake.py [--mps both|on|off] [--out docs/results/gpu_intake.json]

A writer process (`gpu_intake_writer.py`) sends records as fast as there is room, so that a slot that is given back is
overwritten at once. The reader (`gpu_intake_reader.py`) takes them as the sidecar does and checks every record on the
GPU. The phases:

    unregistered       the mapping as it is
    registered         page-locked
    busy stream        page-locked, and the copies wait behind 30 ms of other work on the stream
    released early     the same, but the slot is released before its copies are done: a control, to find wrong bytes
    refused            the driver refuses (it is asked for an address where nothing is): the fallback, told in one line
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_intake_writer import WIDTHS
from gpu_jobs import Job, WarmParent
from gpu_lab import gpu_uuids, machine

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import sidecar_env, without_mps
from mps_trainer.mps.folder import MpsFolder
from mps_trainer.transport.sweep import remove_run

WANTED_GB_S = 45.0


def _run(parent: WarmParent, who: str, env: dict[str, str], mps_folder: str, folder: Path) -> dict[str, Any]:
    run_ids = {size: secrets.token_hex(4) for size in WIDTHS}
    stop = str(folder / "stop")
    nothing = {**without_mps({}), "CUDA_VISIBLE_DEVICES": ""}
    writers: list[Job] = [
        parent.start("gpu_intake_writer:write", run_id, WIDTHS[size], f"{stop}-{run_id}", env=nothing)
        for size, run_id in run_ids.items()
    ]
    try:
        full = "CUDA_LAUNCH_BLOCKING" not in env
        result: dict[str, Any] = parent.start(
            "gpu_intake_reader:read", run_ids, stop, mps_folder, full, env=env
        ).result(50)
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

#!/usr/bin/env python3
"""Whom does the MPS server name for an illegal memory access, and what do culprit and neighbour see of it?

    python scripts/gpu_culprit.py [--repeats 5] [--out RESULT.json]

A neighbour multiplies matrices; a culprit has its CUDA context, waits for a word, and then writes where it may not.
Half of the time the neighbour connects first, half of the time the culprit. Each trial has a daemon of its own. Noted:
the clients that server.log names for the fault, the first one being what the supervisor goes by, and the error that
each process got. About 5 s a trial. Exit status: 0, whatever was found.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter as Count
from pathlib import Path
from typing import Any

from gpu_jobs import Counter, Job, WarmParent
from gpu_lab import gpu_uuids, machine

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import sidecar_env
from mps_trainer.mps.folder import MpsFolder

GIB = 2**30
LOG_S = 3.0


def culprit(path: str) -> None:
    """Connect, count to one, wait for the word, write 1 TiB behind a small tensor."""
    import torch
    from gpu_probation_tasks import write_nowhere

    counter = Counter(Path(path))
    device = torch.device("cuda:0")
    torch.ones(64, device=device).sum().item()
    counter.tick(0)
    while not counter.stopping:
        time.sleep(0.01)
    write_nowhere(device)


def error_of(job: Job) -> str:
    """The first line of the error that ended it."""
    text = job.result_path.read_text() if job.result_path.exists() else ""
    job.result_path.unlink(missing_ok=True)
    said = json.loads(text).get("error", "") if text else f"no word, status {job.status}"
    return str(said).strip().splitlines()[0][:200] if said else "none"


def start(parent: WarmParent, function: str, counter: Counter, env: dict[str, str]) -> Job:
    job = parent.start(function, str(counter.path), env=env)
    if not counter.wait_for(1, 60, job):
        raise RuntimeError(f"{function} did not start: {error_of(job)}")
    return job


def trial(parent: WarmParent, folder: Path, culprit_first: bool) -> dict[str, Any]:
    """One fault with a daemon of its own."""
    (uuid, *_) = gpu_uuids()
    daemon = MpsDaemon(MpsFolder(folder / "m"))
    daemon.start()
    try:
        env = sidecar_env(daemon.folder.pipe_dir, uuid, 8 * GIB)
        counters = {name: Counter(folder / name) for name in ("culprit", "neighbour")}
        order = ("culprit", "neighbour") if culprit_first else ("neighbour", "culprit")
        functions = {"culprit": "gpu_culprit:culprit", "neighbour": "gpu_drill_victim:victim"}
        jobs = {name: start(parent, functions[name], counters[name], env) for name in order}
        counters["culprit"].stop()
        statuses = {name: job.wait(20) for name, job in jobs.items()}
        counters["neighbour"].stop()
        deadline = time.monotonic() + LOG_S
        # The server writes to a file and tells nobody.
        while not daemon.faults() and time.monotonic() < deadline:
            time.sleep(0.05)
        roles = {job.process.pid: name for name, job in jobs.items()}
        faults = daemon.faults()
        log = daemon.log_tail("server", 60).splitlines()
        return {
            "first to connect": order[0], "statuses": statuses,
            "named": [roles.get(fault.pid, fault.pid) for fault in faults],
            "torn down": [[roles.get(pid, pid) for pid in fault.torn_down] for fault in faults],
            "errors": {name: error_of(job) for name, job in jobs.items()},
            "server.log": [line for line in log if "rror" in line or "torn" in line],
        }  # fmt: skip
    finally:
        daemon.quit(force_after_s=5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="of each order")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name, WarmParent(Path(name) / "log") as parent:
        for i in range(2 * args.repeats):
            folder = Path(name) / str(i)
            folder.mkdir()
            trials.append(trial(parent, folder, culprit_first=bool(i % 2)))
            print(json.dumps({key: value for key, value in trials[-1].items() if key != "server.log"}), flush=True)
    named = {
        order: dict(Count(str(one["named"][:1]) for one in trials if one["first to connect"] == order))
        for order in ("neighbour", "culprit")
    }
    print("whom the log names first, by who connected first:", json.dumps(named))
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "named": named, "trials": trials}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

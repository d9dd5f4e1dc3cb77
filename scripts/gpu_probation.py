#!/usr/bin/env python3
"""Does probation stop tasks that break a GPU, and does the process beside it notice nothing?

    python scripts/gpu_probation.py [--out RESULT.json]

A victim is a client of an MPS daemon, multiplies matrices and checks every product. Tasks go through the supervisor's
own probation on the same GPU. The control is the illegal access of one of them in a client of the daemon: the victim
must die of it, or the rest proves nothing. About 50 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_jobs import Counter, Job, WarmParent
from gpu_lab import SCRIPTS, gpu_uuids, machine

from mps_trainer.config import load_settings
from mps_trainer.errors import PlacementError
from mps_trainer.launcher.probation import Refusal, hold_probation
from mps_trainer.launcher.reports import Reporter
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import sidecar_env
from mps_trainer.mps.folder import MpsFolder
from mps_trainer.mps.nvml import read_nvml
from mps_trainer.run import RunRecord

GIB = 2**30

Judge = Callable[[Refusal | None, dict[str, Any]], bool]
CASES: dict[str, Judge] = {
    "Good": lambda refusal, passed: refusal is None and passed["steps"] > 2 and passed["longest_kernel_ms"] > 0,
    "OutOfRange": lambda refusal, _: refusal is not None and "device-side assert" in refusal.error,
    "IllegalAddress": lambda refusal, _: refusal is not None and "illegal memory access" in refusal.error,
    "LongKernel": lambda refusal, passed: refusal is None and any(" takes " in line for line in passed["warnings"]),
    "TooLarge": lambda refusal, _: refusal is not None and "ran out of memory" in refusal.error,
}
# One by one where the victim's harm must have one name; the others side by side, for the sake of time.
ROUNDS = (("Good",), ("OutOfRange",), ("IllegalAddress",), ("LongKernel", "TooLarge"))


def put_on_probation(folder: Path, task: str) -> tuple[Refusal | None, dict[str, Any], float]:
    """What the supervisor does before the first sidecar: (refusal, the report, seconds)."""
    run_dir = folder / task
    run_dir.mkdir()
    settings = load_settings({"task": f"gpu_probation_tasks:{task}", "memory": "4GiB", "batch_size": 256})
    record = RunRecord(
        run_id=task, config="", derived_config="", run_dir=str(run_dir), ray_namespace="", settings=settings.dump(),
        device="cuda:0", mps="on",
    )  # fmt: skip
    record.save(run_dir / "run.json")
    started = time.monotonic()

    def sleep(timeout_s: float, descriptor: int = -1) -> bool:
        return bool(select.select([descriptor] if descriptor >= 0 else [], [], [], min(timeout_s, 0.1))[0])

    refusal = hold_probation(record, run_dir / "run.json", Reporter(None), sleep, lambda: "")
    report = json.loads((run_dir / "probation.json").read_text()) if (run_dir / "probation.json").exists() else {}
    return refusal, report.get("passed", {}), time.monotonic() - started


class Watch:
    """Notes every client that the daemon has ever had."""

    def __init__(self, daemon: MpsDaemon) -> None:
        self.pids: set[int] = set()
        self.looks = 0
        self._daemon = daemon
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.4):
            # One question that the daemon leaves open is no reason to look no more.
            with contextlib.suppress(PlacementError):
                self.pids |= {client.pid for client in self._daemon.clients()}
                self.looks += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def run_round(folder: Path, names: tuple[str, ...], counter: Counter, victim: Job) -> dict[str, dict[str, Any]]:
    before, wrong = counter.value, counter.errors
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: put_on_probation(folder, name), names))
    during = counter.value - before
    alive = counter.wait_for(counter.value + 30, 20, victim)
    rows = {}
    for name, (refusal, passed, seconds) in zip(names, found, strict=True):
        as_wanted = CASES[name](refusal, passed) and alive and during > 0 and counter.errors == wrong
        rows[name] = {
            "outcome": refusal.error.splitlines()[0] if refusal else "passed",
            "to do": refusal.todo if refusal else "",
            "exit code": refusal.code if refusal else 0,
            "report": passed,
            "seconds": round(seconds, 1),
            "victim": {"alive": alive, "products meanwhile": during, "wrong": counter.errors - wrong},
            "as wanted": as_wanted,
        }
    return rows


def run_control(parent: WarmParent, env: dict[str, str], victim: Job) -> dict[str, Any]:
    """The illegal access inside of MPS."""
    job = parent.start("gpu_probation_tasks:control", env=env)
    ended = job.wait(30)
    died = victim.process.wait(10)
    job.result_path.unlink(missing_ok=True)
    return {"victim died": died, "status": ended}


def show(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        report, victim = row["report"], row["victim"]
        numbers = (
            f"step {report['step_ms']:.2f} ms, peak {report['peak'] / 2**20:.0f} MiB, longest kernel "
            f"{report['longest_kernel_ms']:.2f} ms {report['longest_kernel'][:50]}"
            if report
            else f"exit code {row['exit code']}"
        )
        print(f"{name:15} {'as wanted' if row['as wanted'] else 'NOT AS WANTED':13} {row['seconds']:5.1f} s  {numbers}")
        print(f"{'':15} {row['outcome'][:150]}")
        for warning in report.get("warnings", []):
            print(f"{'':15} warns: {warning[:150]}")
        print(f"{'':15} victim: {victim['products meanwhile']} products meanwhile, {victim['wrong']} wrong", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent), *filter(None, sys.path)])
    started = time.monotonic()
    # NVML's first GPU, as `device: cuda:0`.
    uuid = gpu_uuids()[0]
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="mt-") as name, WarmParent(Path(name) / "log") as parent:
        folder = Path(name)
        daemon = MpsDaemon(MpsFolder(folder / "m"))
        daemon.start()
        try:
            env = sidecar_env(daemon.folder.pipe_dir, uuid, 8 * GIB)
            counter = Counter(folder / "victim")
            victim = parent.start("gpu_drill_victim:victim", str(counter.path), env=env)
            if not counter.wait_for(5, 60, victim):
                raise RuntimeError(f"no victim: {victim.result_path.read_text()}\n{daemon.log_tail('server')}")
            watch = Watch(daemon)
            try:
                for names in ROUNDS:
                    found = run_round(folder, names, counter, victim)
                    show(found)
                    rows |= found
            finally:
                watch.close()
            control = run_control(parent, env, victim)
            print("control, the same illegal access inside of MPS ->", control, flush=True)
            counter.stop()
            victim.wait(10)
            victim.result_path.unlink(missing_ok=True)
        finally:
            ended = daemon.quit(force_after_s=5)
    only_the_victim = watch.looks > 0 and watch.pids == {victim.process.pid}
    print(f"clients of the daemon in {watch.looks} looks: {sorted(watch.pids)}, the victim is {victim.process.pid}")
    left = [p.pid for gpu in read_nvml().gpus if gpu.uuid == uuid for p in gpu.processes]
    print(f"daemon ended: {ended}; processes left on the GPU: {left}; {time.monotonic() - started:.0f} s")
    right = all(row["as wanted"] for row in rows.values()) and only_the_victim and control["victim died"]
    if args.out:
        result = {
            "machine": machine(), "results": rows, "only the victim was a client": only_the_victim, "control": control,
            "seconds": round(time.monotonic() - started, 1), "as wanted": right,
        }  # fmt: skip
        args.out.write_text(json.dumps(result, indent=1))
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

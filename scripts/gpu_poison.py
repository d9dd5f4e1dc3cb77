#!/usr/bin/env python3
"""A batch that kills the sidecar, and one that hangs it, in a real run on a shared GPU: who notices, and who does not?

    python scripts/gpu_poison.py [--memory 2GiB] [--budget-s 85] [--rehearse] [--out docs/results/gpu_poison.json]

`mps-trainer up` on cuda:0 under MPS, with a task that hits a device-side assert on one marked experience and hangs in
Python on another. A channel of the operator's feeds batches; a victim, client of the same daemon, multiplies matrices
and checks every product. Wanted: the victim never notices, each poisoned batch is set aside and named, the sidecar
comes back and trains on later batches, and takes the memory that it took before. `--rehearse` does it on the CPU, with
no victim and the assert raised by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_jobs import Counter, Job, WarmParent
from gpu_lab import lab_gpus, machine
from gpu_poison_rounds import Drill, Watcher, wait_until
from gpu_poison_task import ASSERTS_IN_LOSS, ASSERTS_IN_SCORE, HANGS_IN_SCORE

from mps_trainer.launcher.runs import list_runs
from mps_trainer.mps.environment import sidecar_env
from mps_trainer.mps.folder import all_mps_folders, mps_folder

# What the longest round, that of a hang, may take.
ROUND_S = 40.0
VICTIM_LIMIT = 4 * 2**30
HANG_S = 5
CONFIG = """\
mode: explore
project: gpu_poison
name: poison
ray_namespace: gpu_poison/{name}
checkpoint_root_dir: {work}/checkpoints
cluster: {{node_num: 1, gpu_per_node: 1}}
model: {{model_path: /none}}
buffer: {{batch_size: 16, total_steps: 1}}
data_processor:
  experience_pipeline:
    operators:
      - name: mps_trainer.operator.AuxTrainer
        args: {{task: "gpu_poison_task:Poisoned", device: "{device}", mps: "{mps}", join: {join},
               memory: {memory}, batch_size: 64, min_experiences: 1, steps_per_batch: 4, pace: off,
               hang_timeout: {hang_s}s, ready_timeout: 60s}}
"""


def drill(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    deadline = time.monotonic() + args.budget_s
    facts: dict[str, Any] = {}
    before = set() if args.rehearse else {process.pid for process in lab_gpus()[0].processes}
    parent = None if args.rehearse else WarmParent(work / "children.log", preload=["gpu_drill_victim"])
    started = time.monotonic()
    cli("up", str(work / "trinity.yaml"))
    facts["seconds of up"] = time.monotonic() - started
    (run,) = list_runs()
    watcher, victim, counter = Watcher(), None, None
    try:
        if parent is not None:
            env = sidecar_env(mps_folder(run.record.run_id).pipe_dir, lab_gpus()[0].uuid, VICTIM_LIMIT)
            counter = Counter(work / "victim")
            victim = parent.start("gpu_drill_victim:victim", str(counter.path), env=env)
            if not counter.wait_for(20, 60, victim):
                raise RuntimeError(f"no victim: {(work / 'children.log').read_text()[-2000:]}")
            watcher.start()
        lab = Drill(run, parent is not None)
        wait_until(lab.channel.sidecar_alive, 10)
        facts["rounds"] = []
        for way, mark in (("device-side assert in loss()", ASSERTS_IN_LOSS), ("hang in score()", HANGS_IN_SCORE),
                          ("device-side assert in score()", ASSERTS_IN_SCORE)):  # fmt: skip
            if facts["rounds"] and time.monotonic() > deadline - ROUND_S:
                break
            found = lab.poison(way, mark)
            if counter is not None and victim is not None:
                found["victim"] = look_at(counter, victim)
            facts["rounds"].append(found)
            print(f"{time.monotonic() - started:6.1f} s {json.dumps(found)}", flush=True)
        facts["status"] = cli("status").splitlines()
        lab.channel.close()
    finally:
        watcher.stop.set()
        if counter is not None and victim is not None:
            counter.stop()
            victim.wait(20)
        started = time.monotonic()
        cli("down")
        facts["seconds of down"] = time.monotonic() - started
        if parent is not None:
            parent.__exit__(None, None, None)
    facts["memory of the GPU, bytes: least, most"] = [min(watcher.total), max(watcher.total)] if watcher.total else []
    facts["stacks in sidecar.log"] = "in score" in (Path(run.record.run_dir) / "sidecar.log").read_text()
    facts["left"] = {
        "mps folders": [run_id for run_id, _ in all_mps_folders()],
        "shared memory": [p.name for p in Path("/dev/shm").glob(f"*mpst.{run.record.run_id}*")],
        "on the GPU": [] if args.rehearse else [p.pid for p in lab_gpus()[0].processes if p.pid not in before],
    }
    return facts


def look_at(counter: Counter, victim: Job) -> dict[str, Any]:
    """Whether it still computes, and ever computed wrong."""
    going = counter.wait_for(counter.value + 50, 20, victim)
    return {"alive": going and victim.process.is_running, "products": counter.value, "wrong": counter.errors}


def cli(*arguments: str) -> str:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "mps_trainer", *arguments],
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"mps-trainer {arguments[0]}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def is_right(found: dict[str, Any], on_gpu: bool) -> bool:
    before, after = found["sidecar memory before and after, bytes"]
    victim = found.get("victim", {})
    return (
        all(found[key] for key in ("batch before scored", "came back", "batch after scored", "batch after trained on"))
        and len(found["set aside"]) == 1 and found["named in status"]
        and (not on_gpu or (victim["alive"] and not victim["wrong"] and abs((before or 0) - (after or 0)) < 8 * 2**20))
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--budget-s", type=float, default=85)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        work = Path(name)
        os.environ["MPS_TRAINER_STATE_DIR"] = f"{name}/s"
        device, mps = ("cpu", "off") if args.rehearse else (f"cuda:{lab_gpus()[0].index}", "on")
        # The victim knows nothing of the plugin: for `join: plugin` it would be a stranger, and end the run.
        join = "plugin" if args.rehearse else "env"
        (work / "trinity.yaml").write_text(
            CONFIG.format(
                name=work.name, work=work, device=device, mps=mps, join=join, memory=args.memory, hang_s=HANG_S
            )
        )
        try:
            facts = drill(work, args)
        finally:
            if args.out:
                logs = [*work.glob("checkpoints/**/s*.log"), work / "children.log"]
                text = "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-40000:]}" for p in logs if p.exists())
                args.out.with_suffix(".log").write_text(text)
    right = (
        bool(facts["rounds"]) and all(is_right(found, not args.rehearse) for found in facts["rounds"])
        and not any(facts["left"].values())
    )  # fmt: skip
    facts = {
        "machine": {} if args.rehearse else machine(),
        "seconds": time.monotonic() - begin,
        **facts,
        "as wanted": right,
    }
    print(json.dumps(facts, indent=1))
    if args.out:
        args.out.write_text(json.dumps(facts, indent=1))
    return 0 if right else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

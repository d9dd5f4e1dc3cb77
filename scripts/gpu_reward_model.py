#!/usr/bin/env python3
"""The task `reward_model` on vLLM's GPU: steps, experiences and tokens per second, memory, and what it costs vLLM.

    python scripts/gpu_reward_model.py [--kinds lora full] [--memory 24GiB] [--budget-s 420] [--out RESULT.json]

For each kind (LoRA, all weights): a base of the shape of Qwen2.5-0.5B with random weights, `start_mps.sh`, a real
engine of the shape of Qwen2.5-7B that finds the run by its plugin, then arms in turn: the sidecar trains without a
pause, the sidecar idles; at last the engine goes on after `stop_mps.sh`. Steps and tokens are those of metrics.jsonl.
Needs vllm, this package and its extra `reward` installed; starts no kind that would not fit into --budget-s (on a GPU
about 150 s each). Results: docs/results/gpu_reward_model.md. Exit status: 0 as wanted, 1 not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from gpu_beside_vllm import ROUND_S, door, make_command, memory_of
from gpu_engine import Engine, flaws, rate
from gpu_lab import DEVICE, ONLY_GPU, lab_gpus, machine
from gpu_real_run import Feeding, membership, prepare_environment, status_of, wait_for, what_is_left
from gpu_reward_task import RUNS, SHAPES, NotedRewardModel, rows, write_base

from mps_trainer.errors import MpsTrainerError
from mps_trainer.launcher.leftovers import remove_leftovers
from mps_trainer.report.series import batch_lines
from mps_trainer.run import RunRecord, live_runs
from mps_trainer.tasks import wire_columns

CONFIG = """\
mode: explore
project: gpu_lab
name: {name}
checkpoint_root_dir: {work}/checkpoints
model: {{model_path: {work}/none}}
buffer: {{batch_size: 64, total_steps: 100000}}
data_processor:
  experience_pipeline:
    operators:
      - name: mps_trainer.operator.AuxTrainer
        args:
          task: gpu_reward_task:NotedRewardModel
          task_args: {task_args}
          device: {device}
          mps: {mps}
          memory: {memory}
          batch_size: {batch_size}
          min_experiences: {batch_size}
          replay_capacity: {replay_capacity}
          steps_per_batch: 1
          checkpoint_every: 100000
          probation: off
          pace: off
          hang_timeout: 120s
          ready_timeout: 240s
          idle_timeout: 60s
"""
KIND_S, END_S = 150.0, 25.0
#: An idle sidecar has trained on all that it was fed, and so long ago.
QUIET_S = 1.0
# For a step and what it waits for; one of a worst case may take seconds.
STEP_S = 90.0
LATE_KERNELS = 64 * 2**20
ON_GPU = DEVICE != "cpu"


def write_config(work: Path, name: str, args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The Trinity config of one kind, and the task's arguments in it."""
    task_args = {
        "checkpoint": str(work / "base"), "max_tokens": args.max_tokens, "micro_batch_size": args.micro_batch,
        "lora_rank": 16 if name == "lora" else 0, "gradient_checkpointing": not args.keep_activations,
    }  # fmt: skip
    path = work / f"{name}.yaml"
    placement = {"device": f"cuda:{ONLY_GPU or '0'}", "mps": "on"} if ON_GPU else {"device": "cpu", "mps": "off"}
    text = CONFIG.format(
        work=work, name=name, task_args=json.dumps(task_args), memory=args.memory, batch_size=args.batch_size,
        replay_capacity=4 * args.batch_size, **placement,
    )  # fmt: skip
    path.write_text(text)
    return path, task_args


def lines_between(record: RunRecord, begin: float, end: float) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in a span of time.time(); each tells of a batch and its one step."""
    return [line for line in batch_lines(Path(record.run_dir)) if begin <= line["t"] <= end]


def steps_between(record: RunRecord, begin: float, end: float) -> dict[str, float]:
    """Per second between the first and the last line of metrics.jsonl in a span of time.time(); zeros without two."""
    lines = lines_between(record, begin, end)
    if len(lines) < 2:
        return {"steps": 0.0, "experiences": 0.0, "tokens": 0.0, "pairs": 0.0}
    seconds = lines[-1]["t"] - lines[0]["t"]
    # The first line tells of what was before it.
    later = lines[1:]
    return {
        "steps": (lines[-1]["step"] - lines[0]["step"]) / seconds,
        "experiences": (lines[-1]["trained"] - lines[0]["trained"]) / seconds,
        "tokens": sum(line["task"]["tokens"] for line in later) / seconds,
        "pairs": sum(line["task"]["pairs"] for line in later) / seconds,
    }


def is_quiet(feeding: Feeding, record: RunRecord) -> bool:
    lines = batch_lines(Path(record.run_dir))
    return bool(lines) and lines[-1]["batch"] == feeding.sent and time.time() - lines[-1]["t"] > QUIET_S


def settle(feeding: Feeding, record: RunRecord, *, busy: bool) -> None:
    """Until the sidecar trains, or until it has taken all that it was fed and is quiet."""
    if busy:
        began = time.time()
        feeding.paused.clear()
        wait_for(lambda: bool(lines_between(record, began, time.time())), STEP_S, "the sidecar trains")
    else:
        feeding.paused.set()
        wait_for(lambda: is_quiet(feeding, record), STEP_S, "the sidecar idles")


def arm(feeding: Feeding, engine: Engine, record: RunRecord, seconds: float, *, busy: bool) -> dict[str, Any]:
    """At least one whole round of the engine, three steps of a busy sidecar, and `seconds`."""
    settle(feeding, record, busy=busy)
    began, clock = time.time(), time.monotonic()
    least = 3 if busy else 0

    def over() -> bool:
        return time.monotonic() - clock > seconds and len(lines_between(record, began, time.time())) >= least

    wait_for(lambda: over() or not engine.is_alive, seconds + STEP_S, "an arm's end")
    rounds = engine.wait_rounds(clock, 1, ROUND_S)
    status = status_of(record.run_dir)
    sidecar = status.pid if status else 0
    used = [p.used for gpu in lab_gpus() for p in gpu.processes if p.pid == sidecar] if ON_GPU else []
    found = {"busy": busy, "rounds": rounds, "per second": steps_between(record, began, time.time())}
    return {**found, "NVML bytes of the sidecar": used}


def spread(values: list[float]) -> dict[str, float]:
    values = values or [0.0]
    return {"median": median(values), "min": min(values), "max": max(values)}


def compare(arms: list[dict[str, Any]], probe: str) -> dict[str, Any]:
    """Of both kinds of arm: what the engine generates, and what the sidecar does, per second with the spread."""
    found: dict[str, Any] = {}
    for name, busy in (("busy", True), ("idle", False)):
        mine = [one for one in arms if one["busy"] == busy]
        rounds = [r for one in mine for r in one["rounds"]]
        sidecar = {key: spread([one["per second"][key] for one in mine]) for key in ("steps", "experiences", "tokens")}
        found[name] = {"arms": len(mine), "vLLM tokens/s": rate(rounds), **flaws(rounds, probe), "sidecar/s": sidecar}
    idle = found["idle"]["vLLM tokens/s"]["median"]
    share = found["busy"]["vLLM tokens/s"]["median"] / (idle or 1)
    return {**found, "rollout, of what it is beside an idle sidecar": share}


def start_facts(record: RunRecord) -> dict[str, Any]:
    """What the sidecar's log says of its start: the pool, and what the worst step needs and takes."""
    log = (Path(record.run_dir) / "sidecar.log").read_text(errors="replace")
    taken = re.search(r"(\d+) MiB taken \(worst step (\d+) MiB\)", log)
    worst = re.search(r"worst-case step of (\d+) experiences in (\d+) ms", log)
    return {
        "pool, MiB": int(taken[1]) if taken else None, "worst step, MiB": int(taken[2]) if taken else None,
        "worst step, ms": int(worst[2]) if worst else None,
    }  # fmt: skip


def one_kind(work: Path, name: str, args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Start, arms in turn, and the end of one kind of training."""
    found: dict[str, Any] = {}
    config, task_args = write_config(work, name, args)
    engine: Engine | None = None
    feeding: Feeding | None = None
    try:
        found["start_mps.sh, s"] = door("start_mps.sh", config, args.start_s)[1]
        record = next(record for _, record in live_runs())
        found["start"] = start_facts(record)
        columns = wire_columns(NotedRewardModel(**task_args))
        feeding = Feeding(record.run_id, columns, rows(args.shape, RUNS * 4, args.max_tokens))
        env = {**os.environ, "MPS_TRAINER_RUN": record.run_id}
        engine = Engine(work / f"engine-{name}", args.utilization, env, layers=28, max_tokens=96)
        found["engine"] = engine.wait_ready(max(90.0, deadline - time.monotonic()))
        status = status_of(record.run_dir)
        sidecar = status.pid if status else 0
        if ON_GPU:
            found["membership"] = membership(record.run_id, sidecar, engine.process.pid)
        arms: list[dict[str, Any]] = []
        # The first round warms up.
        probe = engine.wait_rounds(engine.rounds()[0]["probe end"], 1, ROUND_S)[0]["probe"]
        while len(arms) < 2 * args.rounds and time.monotonic() + 2 * args.arm_s + END_S < deadline:
            for busy in (True, False):
                arms.append(arm(feeding, engine, record, args.arm_s, busy=busy))
                print(
                    f"{name} {len(arms):2}: {json.dumps({**arms[-1], 'rounds': len(arms[-1]['rounds'])})}", flush=True
                )
            found["comparison"] = compare(arms, probe)
            found["memory"] = memory_of(sidecar, arms)
        found["pair accuracy, last"] = batch_lines(Path(record.run_dir))[-1]["task"].get("pair_accuracy")
        feeding.paused.set()
        found["stop_mps.sh, s"] = door("stop_mps.sh", config)[1]
        after = engine.wait_rounds(time.monotonic(), 1, ROUND_S)
        found["after the sidecar's end"] = {"vLLM tokens/s": rate(after), **flaws(after, probe)}
    finally:
        if engine is not None:
            found["engine at the end"] = {"alive": engine.is_alive, "exit status": engine.close()}
        if feeding is not None:
            feeding.close()
        door("stop_mps.sh", config)
        remove_leftovers()
        found["left"] = what_is_left() if ON_GPU else {}
    return found


def verdict(found: dict[str, Any]) -> dict[str, bool]:
    """Each claim about one kind, and whether it holds."""
    kinds, joined, memory = (found.get(name, {}) for name in ("comparison", "membership", "memory"))
    arms = [kinds.get(name, {}) for name in ("busy", "idle")]
    claims = {
        "trains when busy, not when idle": bool(kinds)
        and arms[0]["sidecar/s"]["steps"]["min"] > 0 and arms[1]["sidecar/s"]["steps"]["max"] == 0,
        "output finite": bool(kinds) and not any(one["not finite"] for one in arms),
        "two arms of each kind": all(one.get("arms", 0) >= 2 for one in arms),
        "engine outlives the sidecar": bool(found.get("engine at the end", {}).get("alive")),
    }  # fmt: skip
    if not ON_GPU:
        return claims
    return {
        **claims,
        "both are clients, by PID": bool(joined.get("sidecar is a client") and joined.get("engine is a client")),
        "tensors' memory constant to the byte": len(memory.get("held by PyTorch, bytes", [])) == 1
        and memory.get("samples", 0) >= 5,
        # Sequences of new lengths have CUDA load kernels; that is inside the limit.
        f"CUDA takes at most {LATE_KERNELS // 2**20} MiB more": memory.get("change, bytes", 1 << 40) <= LATE_KERNELS,
        "nothing left": not any(found.get("left", {"?": True}).values()),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("lora", "full"), default=["lora", "full"])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.5B", help="of the reward model")
    parser.add_argument("--memory", default="24GiB", help="the sidecar's reservation")
    parser.add_argument("--utilization", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=32, help="fewer passes are fewer kernels, see the docs")
    parser.add_argument("--keep-activations", action="store_true", help="no gradient checkpointing")
    parser.add_argument("--rounds", type=int, default=3, help="arms of each kind, interleaved")
    parser.add_argument("--arm-s", type=float, default=8)
    parser.add_argument("--start-s", type=float, default=260, help="the longest that start_mps.sh may take")
    parser.add_argument("--budget-s", type=float, default=420)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    deadline = time.monotonic() + args.budget_s
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: dict[str, Any] = {"settings": {**vars(args), "out": str(args.out)}, "kinds": {}, "problems": []}
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        work = Path(name)
        prepare_environment(work)
        make_command(work)
        found["parameters"] = write_base(work / "base", args.shape)
        for number, kind in enumerate(args.kinds):
            share = (deadline - time.monotonic()) / (len(args.kinds) - number)
            if number and share < KIND_S:
                found["problems"].append(f"{kind} was left out: {share:.0f} s are too few")
                continue
            try:
                found["kinds"][kind] = one_kind(work, kind, args, time.monotonic() + share)
            except (RuntimeError, OSError, MpsTrainerError, StopIteration, subprocess.SubprocessError) as error:
                found["problems"].append(f"{kind}: {type(error).__name__}: {error}")
                logs = [p.read_text(errors="replace")[-3000:] for p in sorted(work.glob("checkpoints/**/sidecar.log"))]
                print("\n".join(logs), file=sys.stderr)
        found["claims"] = {kind: verdict(one) for kind, one in found["kinds"].items()}
        right = not found["problems"] and all(all(one.values()) for one in found["claims"].values())
        print(json.dumps(found, indent=1))
        if args.out:
            facts = machine() if ON_GPU else {}
            args.out.write_text(json.dumps({"machine": facts, **found, "as wanted": right}, indent=1))
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

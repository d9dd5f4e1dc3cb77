#!/usr/bin/env python3
"""How long an operator waits for scores beside a busy vLLM engine, and `join: env` on a real GPU.

    python scripts/gpu_scores.py [--score-where operator] [--join env] [--batches 100] [--rounds 3] [--out RESULT.json]

`start_mps.sh` with the built-in preference classifier, a real engine of the shape of Qwen2.5-7B with random weights
that generates without a pause, and the operator's own feeder (`bench_scores.py`): 768 experiences a batch, one batch
after the other at once, while the sidecar trains on each. With --join env the engine gets the printed variable and the
share of the derived config, nothing else of ours; one more CUDA process then joins, as verl's would, and must be named.
Needs vllm and this package installed. Exit status: 0 as wanted, 1 not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# First: it limits OMP's threads to what Ray gives an operator, before numpy is there.
import bench_scores
import numpy as np
from gpu_beside_vllm import ROUND_S, door, make_command
from gpu_engine import STATISTICS_VARIABLE, Engine, flaws, rate
from gpu_lab import DEVICE, ONLY_GPU, machine
from gpu_real_run import membership, prepare_environment, status_of, wait_for, what_is_left
from omegaconf import OmegaConf

from mps_trainer.errors import MpsTrainerError
from mps_trainer.launcher.leftovers import remove_leftovers
from mps_trainer.mps.environment import PIPE_VARIABLE, without_mps
from mps_trainer.report.series import batch_lines
from mps_trainer.run import RunRecord, live_runs

CONFIG = """\
mode: explore
project: gpu_lab
name: scores
checkpoint_root_dir: {work}/checkpoints
model: {{model_path: {work}/none}}
buffer: {{batch_size: 64, total_steps: 100000}}
explorer:
  rollout_model: {{gpu_memory_utilization: {wish}}}
data_processor:
  experience_pipeline:
    operators:
      - name: mps_trainer.operator.AuxTrainer
        args:
          task: preference_classifier
          task_args: {{max_tokens: {tokens}}}
          use: filter
          score_where: {where}
          device: {device}
          mps: {mps}
          join: {join}
          memory: 4GiB
          replay_capacity: 4096
          score_timeout: 60s
          pace: {pace}
          ready_timeout: 60s
"""
TARGET_MS = 150
ON_GPU = DEVICE != "cpu"
VISITOR = "import torch; a = torch.ones(64, device='cuda'); print('computes', flush=True); input()"


def percentiles(rounds: list[list[tuple[float, dict[str, float], float]]]) -> dict[str, Any]:
    """Milliseconds from the experiences to their scores, over all batches and for each round."""
    taken = [[ms for ms, _, _ in found] for found in rounds]
    every = np.concatenate(taken)
    return {
        "batches": len(every), "p50, ms": float(np.percentile(every, 50)), "p99, ms": float(np.percentile(every, 99)),
        "max, ms": float(every.max()), "p99 by round, ms": [float(np.percentile(found, 99)) for found in taken],
        "median age of a score, s": float(np.median([age for found in rounds for _, _, age in found])),
    }  # fmt: skip


def own_times(record: RunRecord) -> dict[str, list[float]]:
    """Of the sidecar's batches: milliseconds of scoring and of a training step, half and 99 % are under."""
    lines = batch_lines(Path(record.run_dir))
    found = {}
    for key in ("score_ms", "step_ms"):
        values = [line[key] for line in lines if line.get(key) is not None]
        found[f"{key}, p50 and p99"] = [float(np.percentile(values, q)) for q in (50, 99)] if values else []
    return found


def supervisor_lines(record: RunRecord, words: str) -> list[str]:
    log = Path(record.run_dir) / "supervisor.log"
    return [line for line in log.read_text(errors="replace").splitlines() if words in line]


def visit(record: RunRecord, pipe: str) -> list[str]:
    """What the supervisor says of a CUDA process that is no engine and has the variable too."""
    env = {**without_mps(dict(os.environ)), PIPE_VARIABLE: pipe}
    with subprocess.Popen(
        [sys.executable, "-c", VISITOR], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            child.stdout.readline()
            wait_for(lambda: supervisor_lines(record, f"process {child.pid} "), 15, "the visitor is named")
        finally:
            child.communicate("\n", timeout=15)
        return supervisor_lines(record, f"process {child.pid} ")


def join(work: Path, args: argparse.Namespace, record: RunRecord, said: str, found: dict[str, Any]) -> Engine:
    """The engine, started the way that `join` tells."""
    if args.join == "plugin":
        env = {**os.environ, "MPS_TRAINER_RUN": record.run_id, STATISTICS_VARIABLE: "1"}
        return Engine(work / "engine", args.utilization, env, layers=args.layers, max_tokens=96)
    printed = re.search(rf"export {PIPE_VARIABLE}=(\S+)", said)
    if printed is None:
        raise RuntimeError(f"start_mps.sh did not print the variable: {said[-1500:]}")
    share = float(OmegaConf.load(record.derived_config).explorer.rollout_model.gpu_memory_utilization)
    found["join: env"] = {"printed": printed[0], "wished share": args.utilization, "derived share": share}
    env = {**without_mps(dict(os.environ)), PIPE_VARIABLE: printed[1]}
    return Engine(work / "engine", share, env, layers=args.layers, max_tokens=96)


def measure(work: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    config = work / "scores.yaml"
    placement = {"device": f"cuda:{ONLY_GPU or '0'}", "mps": "on"} if ON_GPU else {"device": "cpu", "mps": "off"}
    config.write_text(
        CONFIG.format(
            work=work,
            tokens=args.tokens,
            pace=args.pace,
            where=args.score_where,
            join=args.join,
            wish=args.utilization,
            **placement,
        )
    )
    engine: Engine | None = None
    try:
        said, found["start_mps.sh, s"] = door("start_mps.sh", config)
        record = next(record for _, record in live_runs())
        engine = join(work, args, record, said, found)
        found["engine"] = engine.wait_ready(150)
        status = status_of(record.run_dir)
        if ON_GPU:
            found["membership"] = membership(record.run_id, status.pid if status else 0, engine.process.pid)
        # The first round warms up.
        first = engine.wait_rounds(engine.rounds()[0]["probe end"], 1, ROUND_S)[0]
        begin = time.monotonic()
        run_file = Path(os.environ["MPS_TRAINER_STATE_DIR"]) / "runs" / f"{record.run_id}.json"
        options = SimpleNamespace(**vars(args), experiences=768, warmup=10)
        exchange: Any = bench_scores.measure
        found["scores"] = percentiles(exchange(run_file, options))
        end = time.monotonic()
        rounds = [r for r in engine.wait_rounds(begin, 1, ROUND_S) if r["begin"] < end]
        found["engine meanwhile"] = {"tokens/s": rate(rounds), **flaws(rounds, first["probe"])}
        status = status_of(record.run_dir)
        found["training steps meanwhile"] = status.version if status else 0
        found["the sidecar's own"] = own_times(record)
        found["status"] = dataclasses.asdict(status) if status else {}
        if args.join == "env":
            found["visitor"] = visit(record, found["join: env"]["printed"].partition("=")[2])
        found["supervisor said"] = supervisor_lines(record, "engine")
        door("stop_mps.sh", config)
        after = engine.wait_rounds(time.monotonic(), 1, ROUND_S)
        found["after the sidecar's end"] = {"tokens/s": rate(after), **flaws(after, first["probe"])}
    finally:
        if engine is not None:
            found["engine at the end"] = {"alive": engine.is_alive, "exit status": engine.close()}
            found["engine log"] = engine.log_tail(20_000)
        door("stop_mps.sh", config)
        remove_leftovers()
        found["left"] = what_is_left() if ON_GPU else {}


def verdict(found: dict[str, Any], join: str) -> dict[str, bool]:
    """Each claim, and whether it holds."""
    joined, meanwhile = found.get("membership", {}), found.get("engine meanwhile", {})
    claims = {
        f"p99 under {TARGET_MS} ms": found.get("scores", {}).get("p99, ms", 1e9) < TARGET_MS,
        "output finite, greedy tokens the same": meanwhile.get("not finite", 1) == 0
        and meanwhile.get("greedy differs", 1) == 0,
        "it trained meanwhile": found.get("training steps meanwhile", 0) > 0,
        "engine outlives the sidecar": bool(found.get("engine at the end", {}).get("alive")),
        "nothing left": not any(found.get("left", {"?": True}).values()),
    }  # fmt: skip
    if ON_GPU:
        both = bool(joined.get("sidecar is a client") and joined.get("engine is a client"))
        claims["both are clients, by PID"] = both
    if join != "env":
        return claims
    shares, used = found.get("join: env", {}), found.get("engine", {}).get("utilization")
    return {
        **claims,
        "the engine proven by the supervisor": any("proven" in line for line in found.get("supervisor said", [])),
        "lowered once, in the derived config": shares.get("derived share", 1) < shares.get("wished share", 0)
        and used == shares.get("derived share"),
        "another CUDA process is named": any("became an MPS client" in line for line in found.get("visitor", [])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--join", choices=("plugin", "env"), default="plugin")
    parser.add_argument("--score-where", choices=("sidecar", "operator"), default="sidecar")
    parser.add_argument("--pace", choices=("auto", "off"), default="off", help="off: each step at once")
    parser.add_argument("--utilization", type=float, default=0.95, help="the engine's wish")
    parser.add_argument("--layers", type=int, default=28, help="of the engine's model")
    parser.add_argument("--tokens", type=int, default=1152, help="of each response")
    parser.add_argument("--batches", type=int, default=100, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--pause", type=float, default=0, help="milliseconds between two batches; a rollout takes longer"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: dict[str, Any] = {"settings": {**vars(args), "out": str(args.out)}, "problems": []}
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        work = Path(name)
        prepare_environment(work)
        make_command(work)
        try:
            measure(work, args, found)
        except (RuntimeError, OSError, MpsTrainerError, StopIteration, subprocess.SubprocessError) as error:
            found["problems"].append(f"{type(error).__name__}: {error}")
        finally:
            found["claims"] = verdict(found, args.join)
            right = all(found["claims"].values()) and not found["problems"]
            log = found.pop("engine log", "")
            print(json.dumps(found, indent=1))
            if args.out:
                logs = sorted(work.glob("checkpoints/**/s*.log"))
                log += "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-8000:]}" for p in logs)
                args.out.with_suffix(".log").write_text(log)
                args.out.write_text(
                    json.dumps({"machine": machine() if ON_GPU else {}, **found, "as wanted": right}, indent=1)
                )
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

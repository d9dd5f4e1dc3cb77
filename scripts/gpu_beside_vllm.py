#!/usr/bin/env python3
"""A real vLLM engine and a sidecar on one GPU: proven by PID, memory as planned, output finite, throughput measured.

    python scripts/gpu_beside_vllm.py [--memory 8GiB] [--rounds 6] [--budget-s 150] [--alone] [--out RESULT.json]

`start_mps.sh` on a Trinity config, a real sidecar, and an engine of the shape of Qwen2.5-7B with random weights that
finds the run by its plugin. Then the sidecar trains and idles in turn while the engine generates. With --alone, a
second engine starts after `stop_mps.sh`, with the same utilization and no sidecar, for its KV blocks.
Needs vllm and this package installed (the plugin is an entry point). Exit status: 0 as wanted, 1 not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from gpu_engine import BLOCK_TOKENS, Engine, flaws, kv_block_bytes, rate, weight_bytes
from gpu_lab import SCRIPTS, lab_gpus, machine
from gpu_real_run import (
    Feeding,
    membership,
    prepare_environment,
    status_of,
    trains,
    wait_for,
    what_is_left,
    write_config,
)
from gpu_task import MEMORY_VARIABLE

from mps_trainer.errors import MpsTrainerError
from mps_trainer.launcher.leftovers import remove_leftovers
from mps_trainer.mps.environment import without_mps
from mps_trainer.run import RunRecord, live_runs

ROUND_S = 40.0
# One pair of arms, and what comes after the last: stop, the engine's end, what is left.
PAIR_S, END_S, ALONE_S = 12.0, 20.0, 75.0
# The engine's share less weights; what is left of it beside the KV cache are activations.
LEAST_KV_SHARE = 0.95


def door(script: str, config: Path, timeout_s: float = 100) -> tuple[str, float]:
    """Run start_mps.sh or stop_mps.sh; what it printed, and seconds."""
    started = time.monotonic()
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), str(config)], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout, time.monotonic() - started


def make_command(work: Path) -> None:
    """An `mps-trainer` for the doors that runs this very Python with this very package."""
    (work / "bin").mkdir()
    command = work / "bin" / "mps-trainer"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mps_trainer "$@"\n')
    command.chmod(0o755)
    os.environ["MPS_TRAINER_VENV"] = str(work)


def version(record: RunRecord) -> int:
    status = status_of(record.run_dir)
    return status.version if status else -1


def wait_idle(feeding: Feeding, record: RunRecord) -> None:
    """Until the sidecar has taken all that it was fed, and took no step for a second."""
    last = [version(record), time.monotonic()]

    def idle() -> bool:
        now = version(record)
        if now != last[0] or feeding.backlog:
            last[:] = [now, time.monotonic()]
        return time.monotonic() - last[1] > 1.0

    wait_for(idle, 20, "the sidecar idles")


def arm(feeding: Feeding, engine: Engine, record: RunRecord, sidecar: int, *, busy: bool) -> dict[str, Any]:
    """At least one whole round of the engine with the sidecar busy or idle."""
    if busy:
        feeding.paused.clear()
        wait_for(trains(record), 20, "the sidecar trains")
    else:
        feeding.paused.set()
        wait_idle(feeding, record)
    begin, steps = time.monotonic(), version(record)
    rounds = engine.wait_rounds(begin, 1, ROUND_S)
    steps, seconds = version(record) - steps, time.monotonic() - begin
    used = [p.used for gpu in lab_gpus() for p in gpu.processes if p.pid == sidecar]
    return {"busy": busy, "rounds": rounds, "steps/s": steps / seconds, "NVML bytes of the sidecar": used}


def compare(arms: list[dict[str, Any]], probe: str) -> dict[str, Any]:
    """Tokens and steps per second of both kinds of arm, with their spread."""
    kinds: dict[str, Any] = {}
    for name, busy in (("busy", True), ("idle", False)):
        mine = [one for one in arms if one["busy"] == busy]
        rounds = [r for one in mine for r in one["rounds"]]
        steps = [one["steps/s"] for one in mine] or [0.0]
        kinds[name] = {
            "arms": len(mine), "tokens/s": rate(rounds), **flaws(rounds, probe),
            "steps/s": {"median": median(steps), "min": min(steps), "max": max(steps)},
        }  # fmt: skip
    idle = kinds["idle"]["tokens/s"]["median"]
    return {**kinds, "rollout, of what it is beside an idle sidecar": kinds["busy"]["tokens/s"]["median"] / (idle or 1)}


def memory_of(sidecar: int, arms: list[dict[str, Any]]) -> dict[str, Any]:
    """Free bytes that the sidecar saw while it trained, what PyTorch held, and NVML's view; each must be one number."""
    path = Path(os.environ[MEMORY_VARIABLE])
    rows = [list(map(float, line.split())) for line in path.read_text().splitlines()] if path.exists() else []
    mine = [row for row in rows if row[0] == sidecar]
    # The first samples are from the dry steps before READY, when the reservation is not taken yet.
    whole = max((row[3] for row in mine), default=0.0)
    mine = mine[next((i for i, row in enumerate(mine) if row[3] == whole), 0) :]
    free, held = sorted({int(row[2]) for row in mine}), sorted({int(row[3]) for row in mine})
    return {
        "samples": len(mine), "free to the sidecar, bytes": free, "held by PyTorch, bytes": held,
        "NVML, bytes": sorted({used for one in arms for used in one["NVML bytes of the sidecar"]}),
        "change, bytes": free[-1] - free[0] if free else None,
    }  # fmt: skip


def kv_against_plan(facts: dict[str, Any], total: int) -> dict[str, Any]:
    """The KV cache as a share of what the engine's utilization leaves beside its weights."""
    block = kv_block_bytes(28) * facts["block tokens"] // BLOCK_TOKENS
    room = facts["utilization"] * total - weight_bytes(28)
    return {"bytes": facts["KV blocks"] * block, "of the share beside the weights": facts["KV blocks"] * block / room}


def beside(work: Path, args: argparse.Namespace, found: dict[str, Any], deadline: float) -> None:
    config = write_config(work, "beside", args.memory)
    engine: Engine | None = None
    feeding: Feeding | None = None
    try:
        said, seconds = door("start_mps.sh", config)
        record = next(record for _, record in live_runs())
        found["start"] = {"start_mps.sh, s": seconds, "said": [line for line in said.splitlines() if "READY" in line]}
        print(json.dumps(found["start"]), flush=True)
        feeding = Feeding(record.run_id)
        env = {**os.environ, "MPS_TRAINER_RUN": record.run_id}
        engine = Engine(work / "engine", args.utilization, env, layers=28, max_tokens=args.tokens)
        facts = found["engine"] = engine.wait_ready(max(90.0, deadline - time.monotonic()))
        status = status_of(record.run_dir)
        sidecar = status.pid if status else 0
        found["membership"] = membership(record.run_id, sidecar, engine.process.pid)
        found["KV"] = kv_against_plan(facts, lab_gpus()[0].total)
        print(json.dumps({k: found[k] for k in ("engine", "membership", "KV")}, indent=1), flush=True)
        arms: list[dict[str, Any]] = []
        # The first round warms up.
        probe = engine.wait_rounds(engine.rounds()[0]["probe end"], 1, ROUND_S)[0]["probe"]
        while len(arms) < 2 * args.rounds and time.monotonic() + PAIR_S + END_S < deadline:
            for busy in (True, False):
                arms.append(arm(feeding, engine, record, sidecar, busy=busy))
                last = arms[-1]
                print(
                    f"{len(arms):2} {'busy' if busy else 'idle'}: {rate(last['rounds'])['median']:.0f} tokens/s, "
                    f"{last['steps/s']:.0f} steps/s",
                    flush=True,
                )
            found["comparison"], found["memory"] = compare(arms, probe), memory_of(sidecar, arms)
        found["supervisor said"] = [
            line for line in (Path(record.run_dir) / "supervisor.log").read_text().splitlines() if "engine" in line
        ]
        feeding.paused.clear()
        found["stop_mps.sh, s"] = door("stop_mps.sh", config)[1]
        after = engine.wait_rounds(time.monotonic(), 1, ROUND_S)
        found["after the sidecar's end"] = {"tokens/s": rate(after), **flaws(after, probe)}
    finally:
        if engine is not None:
            found["engine at the end"] = {"alive": engine.is_alive, "exit status": engine.close()}
            found["engine log"] = engine.log_tail(20_000)
        if feeding is not None:
            feeding.close()
        door("stop_mps.sh", config)
        # The daemon ended with its last client, the engine; its folder is swept by whoever comes next.
        remove_leftovers()
        found["left"] = what_is_left()


def alone(work: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """The same engine with the same utilization, without a sidecar and without MPS."""
    engine = Engine(
        work / "alone", found["engine"]["utilization"], without_mps(os.environ), layers=28, max_tokens=args.tokens
    )
    try:
        found["alone"] = engine.wait_ready(200)
        rounds = engine.wait_rounds(engine.rounds()[0]["probe end"], 5, ROUND_S)
        found["alone"]["tokens/s"] = rate(rounds)
        found["KV"]["of those alone"] = found["engine"]["KV blocks"] / found["alone"]["KV blocks"]
    finally:
        engine.close()


def verdict(found: dict[str, Any]) -> dict[str, bool]:
    """Each claim, and whether it holds."""
    joined, memory, kinds = (found.get(name, {}) for name in ("membership", "memory", "comparison"))
    kv = found.get("KV", {})
    arms = [kinds.get(name, {}) for name in ("busy", "idle")]
    return {
        "both are clients, by PID": bool(joined.get("sidecar is a client") and joined.get("engine is a client")),
        "memory constant to the byte": memory.get("change, bytes") == 0 and memory.get("samples", 0) >= 10,
        "KV blocks as planned": kv.get("of the share beside the weights", 0) > LEAST_KV_SHARE
        and abs(kv.get("of those alone", 1.0) - 1) < 0.01,
        "output finite": bool(kinds) and not any(one["not finite"] for one in arms),
        "five arms of each kind": all(one.get("arms", 0) >= 5 for one in arms),
        "trains when busy, not when idle": bool(kinds)
        and arms[0]["steps/s"]["min"] > 0 and arms[1]["steps/s"]["max"] == 0,
        "engine outlives the sidecar": bool(found.get("engine at the end", {}).get("alive")),
        "READY within 15 s": found.get("start", {}).get("start_mps.sh, s", 99) < 15,
        "nothing left": not any(found.get("left", {"?": True}).values()),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--rounds", type=int, default=6, help="arms of each kind, interleaved")
    parser.add_argument("--tokens", type=int, default=96, help="generated for each of the 256 sequences of a round")
    parser.add_argument("--budget-s", type=float, default=150)
    parser.add_argument("--alone", action="store_true", help="the second engine, whatever the budget says")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget_s
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: dict[str, Any] = {"problems": []}
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        work = Path(name)
        prepare_environment(work)
        make_command(work)
        try:
            beside(work, args, found, deadline)
            if args.alone or time.monotonic() + ALONE_S < deadline:
                alone(work, args, found)
        except (RuntimeError, OSError, MpsTrainerError, StopIteration, subprocess.SubprocessError) as error:
            found["problems"].append(f"{type(error).__name__}: {error}")
        finally:
            found["claims"] = verdict(found)
            right = all(found["claims"].values()) and not found["problems"]
            log = found.pop("engine log", "")
            print(json.dumps({name: one for name, one in found.items() if name != "engine"}, indent=1))
            if args.out:
                logs = sorted(work.glob("checkpoints/**/s*.log"))
                log += "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-8000:]}" for p in logs)
                args.out.with_suffix(".log").write_text(log)
                args.out.write_text(json.dumps({"machine": machine(), **found, "as wanted": right}, indent=1))
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

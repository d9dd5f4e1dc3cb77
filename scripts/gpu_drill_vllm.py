#!/usr/bin/env python3
"""Does a real vLLM engine survive every end of a real sidecar beside it?

    python scripts/gpu_drill_vllm.py [--budget-s 200] [--layers 8] [--ways nan,sigterm] [--out RESULT.json]

One engine generates all the time (`gpu_engine`: logprobs finite, greedy tokens the same). Beside it, on its own MPS
server, the real sidecar of a real run trains and is ended in one way after the other; where that ends the run, the
next one is started (`gpu_drill_supervisor`). The last way is `mps-trainer down` with nothing of the drill in it.
Exit status: 0 as wanted, 1 not, 3 nothing wrong so far but the budget was too short.
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
from typing import Any

from gpu_drill_session import Session
from gpu_drill_supervisor import KEEP
from gpu_engine import Engine, flaws, rate
from gpu_lab import machine
from gpu_real_run import membership, wait_for, what_is_left

from mps_trainer.config import Settings
from mps_trainer.errors import MpsTrainerError
from mps_trainer.launcher.leftovers import remove_leftovers
from mps_trainer.launcher.runs import end_runs, list_runs
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.run.process import ProcessIdentity

BY_TASK = ("exit", "assert", "exception", "nan", "oom")
# In this order, so that a budget that ends early cuts the least: what the supervisor restarts comes cheapest.
# `mps-trainer down` comes last, always.
WAYS: tuple[str, ...] = (*BY_TASK, "sigterm", "supervisor-killed", "hang-down", "driver-killed", "sigkill")
if "hang_timeout" in Settings.model_fields:
    WAYS = (*WAYS, "hang-watchdog")
END_S, ROUND_S = 45.0, 40.0
HEADING = "| way | ended after | then | engine rounds since | not finite | greedy differs | tokens/s |"


def trigger(session: Session, way: str, sidecar: ProcessIdentity) -> str:
    """Start the end; a remark for the table."""
    run = session.run
    assert run is not None
    if way in BY_TASK or way.startswith("hang"):
        temporary = session.command.with_suffix(".new")
        temporary.write_text("hang" if way.startswith("hang") else way)
        temporary.replace(session.command)
        wait_for(lambda: not session.command.exists(), 15, "the task takes its command")
    if way == "hang-down":
        sidecar.wait(1.0)  # it hangs by then, and launches
        ended = end_runs([one for one in list_runs() if one.record.run_id == session.run_id], timeout_s=END_S)
        return ", ".join(one.how.value for one in ended)
    if way == "sigterm":
        sidecar.send(signal.SIGTERM)
    elif way == "sigkill":
        sidecar.send(signal.SIGKILL)
    elif way == "supervisor-killed":
        run.supervisor.kill()
        run.supervisor.wait()
    elif way == "driver-killed":
        assert session.owner is not None
        session.owner.kill()
        session.owner.wait()
    return ""


def are_neighbours(session: Session, sidecar: ProcessIdentity, engine: Engine) -> bool:
    """Whether both are clients of one server now; otherwise an end could not reach the engine."""
    joined = membership(session.run_id, sidecar.pid, engine.process.pid)
    return bool(joined["sidecar is a client"] and joined["engine is a client"])


def drill(session: Session, engine: Engine, way: str, probe: str) -> dict[str, Any]:
    """End the sidecar in one way; whether the engine goes on, with what it gives."""
    begun = time.monotonic()
    session.ensure(way)
    sidecar = session.sidecar()
    daemon = MpsDaemon(session.folder)
    both, faults = are_neighbours(session, sidecar, engine), len(daemon.faults())
    asked = time.monotonic()
    remark = trigger(session, way, sidecar)
    # Its supervisor reaps it; where that is dead, init or whoever adopts it does.
    gone = sidecar.wait(END_S)
    ended = time.monotonic()
    then = session.settle(sidecar) if gone else "still there"
    rounds = engine.wait_rounds(ended, 1, ROUND_S)
    return {
        "way": way, "both were clients": both, "ended": gone, "seconds to its end": ended - asked, "remark": remark,
        "then": then, "engine rounds since": len(rounds), **flaws(engine.rounds(asked), probe),
        "tokens/s since": rate(rounds), "faults": [(f.pid, *f.torn_down) for f in daemon.faults()[faults:]],
        "seconds": time.monotonic() - begun,
    }  # fmt: skip


def run_all(work: Path, args: argparse.Namespace, found: dict[str, Any], deadline: float) -> None:
    """Everything into `found`, piece by piece, so that a failure leaves what was seen."""
    session = Session(work, args.memory)
    engine: Engine | None = None
    try:
        session.ensure()
        found["run"] = {"seconds to READY": session.start_seconds[0]}
        env = {**os.environ, "MPS_TRAINER_RUN": session.run_id}
        engine = Engine(work / "engine", args.utilization, env, layers=args.layers, max_tokens=64)
        found["engine"] = engine.wait_ready(max(60.0, deadline - time.monotonic()))
        found["engine"]["its own server"] = found["engine"]["pipe directory"] == str(session.folder.pipe_dir)
        session.ensure()
        found["membership"] = membership(session.run_id, session.sidecar().pid, engine.process.pid)
        # The first round warms up.
        before = engine.wait_rounds(engine.rounds()[0]["probe end"], 3, ROUND_S)
        probe = before[-1]["probe"]
        found["before"] = {"tokens/s": rate(before), **flaws(before, probe)}
        print(json.dumps({k: found[k] for k in ("run", "engine", "membership", "before")}, indent=1))
        print(HEADING, flush=True)
        for way in args.ways:
            # A start, an end, and at the end the last way and the clean-up.
            if time.monotonic() + (65 if way == "hang-watchdog" else 45) > deadline:
                found["not reached"].append(way)
                continue
            try:
                take(found, drill(session, engine, way, probe))
            except (RuntimeError, MpsTrainerError) as error:
                found["problems"].append(f"{way}: {type(error).__name__}: {error}")
                print(found["problems"][-1], flush=True)
                if not engine.is_alive:
                    raise
                session.end()
        session.ensure()
        since = time.monotonic()
        found["after"] = {"tokens/s": rate(engine.wait_rounds(since, 3, ROUND_S)), **flaws(engine.rounds(since), probe)}
        last_way(session, engine, probe, found)
    finally:
        clean_up(session, engine, found)


def take(found: dict[str, Any], row: dict[str, Any]) -> None:
    found["rows"].append(row)
    print(
        f"| {row['way']} | {row['seconds to its end']:.1f} s | {row['then']} | {row['engine rounds since']} | "
        f"{row['not finite']} | {row['greedy differs']} | {row['tokens/s since']['median']:.0f} |",
        flush=True,
    )


def last_way(session: Session, engine: Engine, probe: str, found: dict[str, Any]) -> None:
    """`mps-trainer down` as a user runs it: the daemon is asked to end too, while the engine lives on."""
    (session.folder.path / KEEP).unlink()
    sidecar = session.sidecar()
    both, asked = are_neighbours(session, sidecar, engine), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "mps_trainer", "down", session.run_id],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    gone, ended = sidecar.wait(5), time.monotonic()
    rounds = engine.wait_rounds(ended, 2, ROUND_S)
    row = {
        "way": "mps-trainer down", "both were clients": both, "ended": gone, "seconds to its end": ended - asked,
        "remark": done.stdout[-300:], "then": f"exit status {done.returncode}", "engine rounds since": len(rounds),
        **flaws(engine.rounds(asked), probe), "tokens/s since": rate(rounds), "faults": [],
    }  # fmt: skip
    take(found, row)


def clean_up(session: Session, engine: Engine | None, found: dict[str, Any]) -> None:
    if engine is not None:
        found["engine at the end"] = {"alive": engine.is_alive, "exit status": engine.close()}
        found["engine log"] = engine.log_tail(6000)
    session.end()
    daemon = MpsDaemon(session.folder)
    process = daemon.find()
    try:
        # Asked to end by `down` already, it ends with its last client, the engine.
        found["daemon ended with the engine"] = process is None or process.wait(10)
        if daemon.find() is not None:
            daemon.quit(force_after_s=5)
        remove_leftovers()
    except MpsTrainerError as error:
        found["problems"].append(f"clean-up: {error}")
    found["left"] = what_is_left()


def verdict(found: dict[str, Any]) -> int:
    rows = found["rows"]
    good = [
        row["ended"] and row["both were clients"] and row["engine rounds since"] > 0 and not row["not finite"]
        for row in rows
    ]  # fmt: skip
    # Greedy tokens count where they were the same in every round before the first end.
    greedy = not found.get("before", {"greedy differs": 1})["greedy differs"]
    same = not greedy or not any(row["greedy differs"] for row in rows)
    joined = found.get("membership", {})
    right = (
        all(good) and bool(rows) and same and not found["problems"]
        and joined.get("sidecar is a client") and joined.get("engine is a client")
        and found.get("engine at the end", {}).get("alive") and not any(found["left"].values())
    )  # fmt: skip
    found["greedy tokens are reproducible"], found["as wanted"] = greedy, bool(right) and not found["not reached"]
    return 1 if not right else 3 if found["not reached"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", type=lambda text: tuple(text.split(",")), default=WAYS, help=", ".join(WAYS))
    parser.add_argument("--budget-s", type=float, default=200)
    parser.add_argument("--layers", type=int, default=8, help="of the engine's model; 28 are Qwen2.5-7B")
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"no way {', '.join(unknown)}")
    deadline = time.monotonic() + args.budget_s
    found: dict[str, Any] = {"rows": [], "not reached": [], "problems": []}
    # So that the clean-up runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    status = 1
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        work = Path(name)
        try:
            run_all(work, args, found, deadline)
        except (RuntimeError, OSError, AssertionError, MpsTrainerError, subprocess.SubprocessError) as error:
            found["problems"].append(f"{type(error).__name__}: {error}")
        finally:
            found.setdefault("left", {})
            status = verdict(found)
            if args.out:
                logs = sorted(work.glob("checkpoints/**/s*.log"))
                text = "\n".join(f"== {p.parent}/{p.name}\n{p.read_text(errors='replace')[-8000:]}" for p in logs)
                args.out.with_suffix(".log").write_text(found.pop("engine log", "") + text)
                args.out.write_text(json.dumps({"machine": machine(), **found}, indent=1))
    print("problems:", found["problems"], "\nafter:", found.get("after"), "\nleft:", found["left"])
    print("not reached:", found["not reached"], "\nas wanted:", found["as wanted"])
    return status


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""The pace on a GPU, in one visit: rollout kept, trainer share, time per token, and what listening to the engine costs.

    python scripts/gpu_pace.py [--budget-s 1500] [--tasks A,B] [--slowdown 0.03] [--part pace] [--plan] [more flags]

The benchmark (`docs/benchmark.md`) with the arms that matter here, interleaved: no trainer, the same engine as a client
of MPS, time slices (whose trainer alone is the dedicated one), low priority without a pace, low priority with it; at
gaps of 0, 10 and 30 % (`--gap`). More flags are the benchmark's: `--pace-set key=value`, `--trace FILE`, `--overlap`,
`--pace-variant name:key=value,...`. Engines start once for both tasks and all gaps. Then sessions of the solo rollout
with vLLM's statistics off, on, off, on: they are fixed when an engine starts, so the session is the round.
Where one command may not last so long, do one --part at a time.
Needs vllm and one GPU (the daemon is the benchmark's own). Each part has its share of the budget; what was cut says so.
Exit status: 0 when every part has a result, 1 not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ARMS = "none,none-client,time-slices,mps-low,mps-pace"
GAPS = "0,0.1,0.3"
#: Of the budget, for the sessions about statistics.
STATISTICS_SHARE = 0.25
STATISTICS_SESSIONS = (False, True, False, True)
#: What the issue asks for at 30 % gaps: rollout kept while busy, trainer of dedicated over the cycle.
WANTED = {"A": (0.97, 0.6), "B": (0.95, 0.35)}


def command(options: argparse.Namespace, arms: str, tasks: str, gaps: str, budget_s: float, out: Path) -> list[str]:
    """Of one benchmark."""
    more = ["--engine", options.engine, "--slowdown", str(options.slowdown), "--rounds", str(options.rounds)]
    pins = [
        word
        for name, cores in (("engine", options.pin_engine), ("trainer", options.pin_trainer))
        if cores
        for word in (f"--pin-{name}", cores)
    ]
    return [
        sys.executable, "-m", "mps_trainer", "bench", "--arms", arms, "--tasks", tasks, "--gap", gaps,
        "--shape", options.shape, "--budget-s", f"{budget_s:.0f}", "--out", str(out), *more, *pins,
    ]  # fmt: skip


def bench(words: list[str], out: Path, limit_s: float) -> dict[str, Any]:
    """Its result, or {"failed": why}."""
    print("$ " + " ".join(words[1:]), flush=True)
    try:
        done = subprocess.run(words, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"not within {limit_s:.0f} s"}
    path = out.with_suffix(".json")
    if not path.exists():
        return {"failed": f"exit status {done.returncode} and no result"}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One line an arm and gap, with the time per token against the solo rollout of the same gap."""
    lines = []
    for session in found.get("sessions", []):
        solo = {r["load"]: middle(r["token_ms_p99"]) for r in session["rows"] if r["arm"] == "none"}
        for row in session["rows"]:
            p99, alone = middle(row["token_ms_p99"]), solo.get(row["load"])
            lines.append(
                {
                    "task": session["task"], "arm": row["arm"], "load": row["load"],
                    "rollout kept": row["rollout_kept"], "trainer, of dedicated": row["of_dedicated"],
                    "p99 per token, of solo": p99 / alone if p99 and alone else None, "outputs": row["outputs"],
                }
            )  # fmt: skip
    return lines


def middle(value: Any) -> float | None:
    """The median of a figure of the benchmark."""
    return value["median"] if isinstance(value, dict) else value


def verdict(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What was asked for, and whether the median of the arm with the pace reaches it."""
    paced = [line for line in lines if line["arm"].startswith("mps-pace")]
    told: dict[str, Any] = {}
    for task, (kept, share) in WANTED.items():
        for line in paced:
            if line["task"] != task:
                continue
            name = f"{task}, {line['load']}, {line['arm']}"
            told[f"{name}: kept >= {kept}"] = (middle(line["rollout kept"]) or 0) >= kept
            if line["load"] == "gap 30 %":
                told[f"{name}: trainer >= {share}"] = (middle(line["trainer, of dedicated"]) or 0) >= share
            told[f"{name}: p99 < 1.1 x solo"] = (line["p99 per token, of solo"] or 9) < 1.1
    return told


def statistics_cost(results: list[tuple[bool, dict[str, Any]]]) -> dict[str, Any]:
    """Share by which solo batches take longer with statistics on; medians of the sessions."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for on, found in results:
        for session in found.get("sessions", []):
            seconds[on] += [b["seconds"] for w in session["windows"] if w["arm"] == "none" for b in w["batches"]]
    if not all(seconds.values()):
        return {"failed": "no batches of both kinds"}
    off, on_s = median(seconds[False]), median(seconds[True])
    return {"off, s": seconds[False], "on, s": seconds[True], "cost": on_s / off - 1}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=1500)
    parser.add_argument("--tasks", default="A,B")
    parser.add_argument("--slowdown", type=float, default=0.03)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", default="7B")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--pin-engine", default="")
    parser.add_argument("--pin-trainer", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gap", default=GAPS, help="silent shares of the cycle")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--part", choices=("both", "pace", "statistics"), default="both")
    parser.add_argument("--plan", action="store_true", help="print the commands and start nothing")
    options, options.more = parser.parse_known_args()
    return options


def main() -> int:
    options = parse()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        folder = Path(name)
        share = {"both": STATISTICS_SHARE, "pace": 0.0, "statistics": 1.0}[options.part]
        main_s = options.budget_s * (1 - share)
        each_s = options.budget_s * share / len(STATISTICS_SESSIONS)
        paced = command(options, options.arms, options.tasks, options.gap, main_s, folder / "pace") + options.more
        # A trainer has to be there, and the one on the CPU leaves the GPU alone.
        solo = [
            command(options, "none,sidecar-cpu", "A", "0", each_s, folder / f"statistics-{i}")
            + (["--statistics"] if on else [])
            for i, on in enumerate(STATISTICS_SESSIONS)
        ]
        if options.plan:
            for words in (*([paced] if main_s else []), *(solo if each_s else [])):
                print("$ " + " ".join(words[1:]))
            return 0
        found = bench(paced, folder / "pace", main_s + 60) if main_s else {}
        lines = rows_of(found)
        results = []
        for i, (on, words) in enumerate(zip(STATISTICS_SESSIONS, solo, strict=True)):
            left = options.budget_s - (time.monotonic() - begin)
            if each_s and left > 30:
                results.append((on, bench(words, folder / f"statistics-{i}", left)))
        told = {
            "rows": lines, "claims": verdict(lines), "statistics": statistics_cost(results) if each_s else {},
            "idle": [session.get("idle") for session in found.get("sessions", [])],
            "failed": found.get("failed", ""), "benchmark": found,
        }  # fmt: skip
    print(json.dumps({key: value for key, value in told.items() if key != "benchmark"}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(told, indent=1))
    return int(bool(told["failed"]) or bool(main_s and not lines) or "failed" in told["statistics"])


if __name__ == "__main__":
    sys.exit(main())

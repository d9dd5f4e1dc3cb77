#!/usr/bin/env python3
"""Does a sidecar that ends, in any way, harm the process beside it?

    python scripts/gpu_fault_drill.py [--trials 20] [--lanes 5] [--budget-s 240] [--out RESULT.json]
    python scripts/gpu_fault_drill.py --ways sigterm,assert,control --trials 5 [--resume RESULT.json]

A victim multiplies matrices on the GPU and checks every product. Beside it a sidecar trains and ends in one way. Our
ways use the sidecar's and the supervisor's own code; the naive ways, which use none of it, are the control: if
none of them kills a victim, the drill proves nothing. Lanes run side by side (`gpu_drill_victim`); with two GPUs, on
both. Exit status: 0 as wanted, 1 not, 3 nothing wrong so far but the budget was too short.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from math import comb
from pathlib import Path
from typing import Any

from gpu_drill_victim import Lane
from gpu_drill_ways import ALL, BOUNDS, NAIVE, OURS
from gpu_lab import gpu_uuids, machine

from mps_trainer.errors import MpsTrainerError

GROUPS = {"ours": OURS, "control": NAIVE, "bounds": BOUNDS}
# For the last trials and the end of the daemons, within the budget.
RESERVE_S = 15.0
SAVE_EVERY_S = 10.0
Row = dict[str, Any]


class Drill:
    """What is still to do and what was found, for all lanes."""

    def __init__(self, todo: list[str], rows: list[Row], deadline: float, out: Path | None) -> None:
        self.rows = rows
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._todo = todo
        self._deadline = deadline
        self._out = out
        self._guard = threading.Lock()
        self._started = self._saved = time.monotonic()

    def stop(self, *_: object) -> None:
        """A signal: the trials that run are the last ones."""
        self._deadline = 0.0

    def work(self, folder: Path, uuid: str, index: int) -> None:
        """One lane, in a thread of its own, to the end of the trials or of the time."""
        lane: Lane | None = None
        way = ""
        try:
            lane = Lane(folder, uuid, index)
            while way := self._next():
                row, way = lane.trial(way), ""
                self._take(row)
        except (RuntimeError, OSError, MpsTrainerError, AssertionError) as error:
            with self._guard:
                self.problems.append(f"lane {index}, {way or 'between trials'}: {type(error).__name__}: {error}")
                if way:
                    # Another lane may have it.
                    self._todo.insert(0, way)
        finally:
            if lane is not None:
                lane.close()
                with self._guard:
                    self.notes += lane.notes

    def _next(self) -> str:
        with self._guard:
            return self._todo.pop(0) if self._todo and time.monotonic() < self._deadline else ""

    def _take(self, row: Row) -> None:
        with self._guard:
            self.rows.append(row)
            n = sum(one["way"] == row["way"] and one["up"] for one in self.rows)
            fate = "VICTIM DIED" if row["victim died"] else "survived"
            fate += f", {row['wrong results']} WRONG RESULTS" if row["wrong results"] else ""
            print(
                f"[{time.monotonic() - self._started:5.1f} s] lane {row['lane']} {row['way']:18} {n:3} {fate}, "
                f"status {row['status']}{' (' + row['how'] + ')' if row['how'] else ''}, {row['seconds']:.1f} s",
                flush=True,
            )
            if self._out and time.monotonic() - self._saved > SAVE_EVERY_S:
                self._saved = time.monotonic()
                save(self._out, {"rows": self.rows, "problems": self.problems})


def save(path: Path, facts: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(facts, indent=1))
    temporary.replace(path)


def upper_bound(died: int, n: int) -> float:
    """The largest rate at which so few deaths in `n` trials still happen in 1 of 20 series (Clopper and Pearson)."""
    if died >= n:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        at_most = sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(died + 1))
        low, high = (p, high) if at_most > 0.05 else (low, p)
    return high


def plan(ways: list[str], counts: dict[str, int], rows: list[Row]) -> list[str]:
    """The control first, alone, so that no death among ours can be its doing; then round by round, all ways alike."""
    done = {way: sum(row["way"] == way and row["up"] for row in rows) for way in ways}
    groups = [[way for way in ways if way in group] for group in (NAIVE, OURS, BOUNDS)]
    most = max(counts.values(), default=0)
    return [way for group in groups for i in range(most) for way in group if done[way] <= i < counts[way]]


def judge(rows: list[Row], way: str) -> dict[str, Any]:
    mine = [row for row in rows if row["way"] == way]
    up = [row for row in mine if row["up"]]
    wanted = ALL[way].statuses
    meant = [row for row in up if (row["status"] in wanted if wanted else row["status"] != 0)]
    died = sum(row["victim died"] for row in up)
    return {
        "how": ALL[way].text, "trials": len(up), "ended as meant": len(meant), "never up": len(mine) - len(up),
        "victims that died": died, "bound": upper_bound(died, len(up)) if up else 1.0,
        "wrong results": sum(row["wrong results"] for row in up),
        "statuses": sorted({row["status"] for row in up}, key=str),
        "median s": sorted(row["seconds"] for row in up)[len(up) // 2] if up else None,
    }  # fmt: skip


def report(drill: Drill, counts: dict[str, int]) -> tuple[dict[str, Any], int]:
    """Print the table; the facts for the file, and the exit status."""
    table = {way: judge(drill.rows, way) for way in counts}
    print("\n| how it ended | victims that died | 95 % bound on the rate | wrong results | ended as meant | median s |")
    print("|---|---|---|---|---|---|")
    for row in table.values():
        print(
            f"| {row['how']} | {row['victims that died']} of {row['trials']} | {row['bound']:.3f} | "
            f"{row['wrong results']} | {row['ended as meant']} {row['statuses']} | {row['median s'] or 0:.1f} |"
        )
    ours = [row for way, row in table.items() if way in OURS]
    n, deaths = sum(r["trials"] for r in ours), sum(r["victims that died"] for r in ours)
    wrong = sum(r["wrong results"] for r in ours)
    control = sum(table[way]["victims that died"] for way in NAIVE if way in table)
    print(f"our ways together: {deaths} of {n} died (95 % bound {upper_bound(deaths, n):.4f}), {wrong} wrong results")
    print(f"the control: {control} died; problems: {drill.problems}\nnotes: {sorted(set(drill.notes))[:8]}")
    complete = all(table[way]["ended as meant"] >= counts[way] for way in counts if way in OURS)
    complete = complete and all(table[way]["trials"] >= counts[way] for way in counts)
    bad = deaths + wrong > 0 or (any(way in NAIVE and table[way]["trials"] for way in counts) and not control)
    status = 1 if bad else 0 if complete and not drill.problems else 3
    facts = {"table": table, "rows": drill.rows, "problems": drill.problems, "notes": sorted(set(drill.notes))}
    print(f"as wanted: {status == 0}{' (not complete)' if status == 3 else ''}")
    return {**facts, "as wanted": status == 0}, status


def chosen(words: str) -> list[str]:
    ways: list[str] = []
    for word in words.split(","):
        found = GROUPS.get(word, {word: None} if word in ALL else None)
        if found is None:
            sys.exit(f"no way {word!r}; there are {', '.join(GROUPS)} and {', '.join(ALL)}")
        ways += [way for way in found if way not in ways]
    return ways


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="ours,control", help="names or groups: ours, control, bounds")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--naive-trials", type=int, default=10)
    parser.add_argument("--lanes", type=int, default=5, help="for each GPU")
    parser.add_argument("--budget-s", type=float, default=240)
    parser.add_argument("--speed", action="store_true", help="only measure what a step takes with each kind of launch")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path, help="a result whose trials count")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget_s - RESERVE_S
    counts = {way: args.naive_trials if way in NAIVE else args.trials for way in chosen(args.ways)}
    rows = json.loads(args.resume.read_text())["rows"] if args.resume and args.resume.exists() else []
    drill = Drill(plan(list(counts), counts, rows), rows, deadline, args.out)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drill.stop)
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        places = [(uuid, f"{g}{k}") for g, uuid in enumerate(gpu_uuids()) for k in range(args.lanes)]
        if args.speed:
            return measure_speed(Path(name) / "s", places[0][0], args.out)
        threads = [
            threading.Thread(target=drill.work, args=(Path(name) / place, uuid, index))
            for index, (uuid, place) in enumerate(places)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        logs = "".join(path.read_text()[-1500:] for path in sorted(Path(name).glob("*/children.log")))
    facts, status = report(drill, counts)
    if args.out:
        save(args.out, {"machine": machine(), "lanes": len(places), **facts, "children's logs end": logs[-6000:]})
    return status


def measure_speed(folder: Path, uuid: str, out: Path | None) -> int:
    lane = Lane(folder, uuid, 0)
    try:
        found = {kind: lane.speed(kind) for kind in ("mlp", "heavy", "transformer")}
    finally:
        lane.close()
    print("ms of a step alone, launches free and as the sidecar's:", found)
    if out:
        save(out, {"machine": machine(), "step ms": found})
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

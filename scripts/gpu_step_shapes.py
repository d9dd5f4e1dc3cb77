#!/usr/bin/env python3
"""Which shape of a training step is fast beside a busy neighbour, and which leaves it most of its speed?

    python scripts/gpu_step_shapes.py --plan                                 # what it would do; needs no GPU
    python scripts/gpu_step_shapes.py [--budget-s 150] [--tasks A,B] [--shapes eager,graph] [--out RESULT.json]
    python scripts/gpu_step_shapes.py --engine vllm --budget-s 420           # beside a real engine instead
    python scripts/gpu_step_shapes.py --go-on --out RESULT.json              # what the budget cut the last time
    python scripts/gpu_step_shapes.py --device cpu                           # tiny, to see that it works

The benchmark's models A and B in clients of MPS of low priority. Each row is a task and a shape of the step: eager,
fused optimizer, one CUDA graph, parts of the batch, torch.compile, a share of the SMs, a green context. Each is
measured beside nobody, beside a stand-in that decodes and beside one that computes prompts: ms per step (p50, p99),
operations, and what is left of the neighbour's speed, which is measured alone before and after each. In each cell the
weights after a few steps are compared with those of a float32 reference (`gpu_step_model.py` says the tolerance).
A row that fails is a row; what the budget does not hold says so. Exit status: 0 when every row has an end that is
known, the eager rows are right and no neighbour died; 1 not.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_step_lab import Lab
from gpu_step_neighbour import ENGINE_SETTING, SETTINGS
from gpu_step_plan import END_S, ROW_S, SHAPES, SILENT_S, clients_of, plan

from mps_trainer.errors import MpsTrainerError


def table(rows: list[dict[str, Any]], settings: tuple[str, ...]) -> list[str]:
    """Markdown, a line a row."""
    lines = ["| task | shape | operations | " + " | ".join(f"{s}: ms p50, p99; kept" for s in settings) + " | right |"]
    lines.append("|---" * (len(settings) + 4) + "|")
    for row in rows:
        cells = {cell["beside"]: cell for cell in row["cells"]}
        told = []
        for setting in settings:
            one = cells.get(setting)
            kept = f"; {one['kept']:.3f}" if one and "kept" in one else ""
            told.append(f"{one['p50, ms']:.2f}, {one['p99, ms']:.2f}{kept}" if one else "-")
        right = row["failed"] or ("yes" if cells and all(is_right(cell) for cell in cells.values()) else "**no**")
        count = row["facts"].get("nodes of the graph") or row["facts"].get("operations") or "-"
        lines.append(f"| {row['task']} | {row['shape']} | {count} | {' | '.join(told)} | {right} |")
    return lines


def is_right(cell: dict[str, Any]) -> bool:
    """Whether weights and losses of a cell are as they should be."""
    return bool(cell["right"] and cell["losses finite"])


def verdict(found: dict[str, Any]) -> dict[str, bool]:
    """What is claimed, and whether it holds; a shape that fails is a finding and no fault."""
    rows = list(found["rows"].values())
    eager = [row for row in rows if row["shape"] == "eager"]
    cells = [cell for row in eager for cell in row["cells"]]
    return {
        "every row has an end": bool(rows) and all(row["ends"] or row["failed"] for row in rows),
        "eager rows end and are right": all(row["ends"] for row in eager) and all(map(is_right, cells)),
        "nothing broke the neighbour": not found["problems"],
    }


def names_in(known: list[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(known)}")
        # In the table's order, whatever the flag's.
        return [name for name in known if name in names]

    return read


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=150, help="the last rows are left out rather than ended late")
    parser.add_argument("--tasks", type=names_in(list(ROW_S)), default=list(ROW_S))
    parser.add_argument("--shapes", type=names_in(list(SHAPES)), default=list(SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--cell-s", type=float, default=0.5, help="the least that a row is measured beside a neighbour")
    parser.add_argument("--silent-s", type=float, default=SILENT_S, help="a client that says nothing for so long hangs")
    parser.add_argument("--engine", choices=("none", "vllm"), default="none", help="a real engine, not the stand-in")
    parser.add_argument("--utilization", type=float, default=0.5, help="gpu_memory_utilization of the engine")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, no MPS")
    parser.add_argument("--go-on", action="store_true", help="keep the rows of --out, measure those that were left out")
    parser.add_argument("--plan", action="store_true", help="print what it would do and start nothing")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.plan:
        print("\n".join(plan(args)))
        return 0
    if args.engine == "vllm" and args.device == "cpu":
        raise SystemExit("--engine vllm needs --device cuda")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + args.budget_s - END_S
    print("\n".join(plan(args)), flush=True)
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        lab = Lab(args, Path(name), deadline)
        if args.go_on and args.out and args.out.exists():
            lab.go_on(json.loads(args.out.read_text()))
        # Where it cannot be written is found out before anything starts.
        lab.write()
        try:
            with lab:
                lab.make_reference(args.tasks)
                lab.start_neighbour()
                for rows in clients_of(args.tasks, args.shapes).values():
                    lab.measure(rows)
        except (RuntimeError, OSError, MpsTrainerError) as error:
            # What was measured before is worth its time all the same.
            lab.found["problems"].append(f"{type(error).__name__}: {error}")
            print((Path(name) / "log").read_text(errors="replace")[-3000:] if (Path(name) / "log").exists() else "")
    lab.found["claims"] = verdict(lab.found)
    lab.write()
    rows = list(lab.found["rows"].values())
    print("\n".join(table(rows, (ENGINE_SETTING,) if args.engine == "vllm" else SETTINGS)))
    right = all(lab.found["claims"].values())
    print(json.dumps({"problems": lab.found["problems"], **lab.found["claims"]}, indent=1))
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

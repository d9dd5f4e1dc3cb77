"""For `gpu_step_shapes.py`: the shapes of a training step, which client measures which, and how long that may take."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from gpu_step_neighbour import ENGINE_SETTING, SETTINGS


@dataclass(frozen=True)
class Shape:
    """How a step is taken.

    Attributes:
        client: rows of one name share a process, unless one before them broke it.
        optimizer: "foreach" or "fused".
        pieces: of the batch; the device is waited for between them.
        share: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE.
        green: SMs of a green context; 0: none.
        blocking: CUDA_LAUNCH_BLOCKING, as the sidecar has it on a shared GPU.
        in_flight: operations at most, by events; 0: the whole step.
    """

    what: str
    client: str = "plain"
    optimizer: str = "fused"
    graph: bool = False
    pieces: int = 1
    compiled: bool = False
    share: int = 100
    green: int = 0
    blocking: bool = False
    in_flight: int = 0

    @property
    def needs_cuda(self) -> bool:
        """torch.compile does not, but on a CPU it would ask for a C++ compiler and minutes."""
        return self.graph or self.compiled or self.blocking or bool(self.green) or self.share < 100


#: Arguments of a task and experiences in a batch.
LARGE_SIZES: dict[str, Any] = {"A": ({}, 256), "B": ({}, 16)}
TINY_SIZES: dict[str, Any] = {
    "A": ({"width": 32, "hidden": [16, 8]}, 16),
    "B": ({"layers": 1, "width": 16, "heads": 2, "vocabulary": 50, "max_tokens": 16}, 8),
}
#: The most interesting first: a budget cuts the last. 20, 40 and 70 % are known to give wrong products.
SHAPES = {
    "eager": Shape("eager, foreach AdamW, the step waited for", optimizer="foreach"),
    "fused": Shape("eager, fused AdamW as in all rows below"),
    "graph": Shape("the whole step one CUDA graph, fused AdamW", graph=True),
    "pieces": Shape("eager, the batch in 4 pieces, each waited for", pieces=4),
    "blocking": Shape("eager, every kernel waited for: the sidecar today", "blocking", blocking=True),
    "few-8": Shape("eager, eight operations in flight at most", in_flight=8),
    "share-25": Shape("eager, 25 % of the SMs", "share-25", share=25),
    "green-32": Shape("eager in a green context of 32 SMs", "green", green=32),
    "green-16": Shape("eager in a green context of 16 SMs", "green", green=16),
    "share-50": Shape("eager, 50 % of the SMs", "share-50", share=50),
    "share-10": Shape("eager, 10 % of the SMs", "share-10", share=10),
    "compile": Shape("torch.compile of the model, fused AdamW", "compile", compiled=True),
}
ROW_S, COMPILE_S = {"A": 4.0, "B": 7.0}, {"A": 15.0, "B": 35.0}
#: For a client to start, the reference, warm parent with daemon and neighbour; the end.
CLIENT_S, REFERENCE_S, START_S, END_S, ENGINE_S = 3.0, 8.0, 12.0, 5.0, 110.0
#: No line for so long: the client hangs. A cell is 4 s and four steps at most.
SILENT_S = 45.0


def row_s(task: str, shape: str) -> float:
    """About what a row takes; guessed, no row was measured yet."""
    return ROW_S[task] + (COMPILE_S[task] if SHAPES[shape].compiled else 0.0)


def clients_of(tasks: list[str], shapes: list[str]) -> dict[str, list[list[str]]]:
    """Rows by client, in the order of the table."""
    found: dict[str, list[list[str]]] = {}
    for name in shapes:
        found.setdefault(SHAPES[name].client, []).extend([task, name] for task in tasks)
    return found


def variables(rows: list[list[str]]) -> dict[str, str]:
    """Of a client's environment, beside those of MPS."""
    shape = SHAPES[rows[0][1]]
    # In the client itself, so that compiling leaves no process behind.
    more = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if shape.compiled else {}
    return {**more, **({"CUDA_LAUNCH_BLOCKING": "1"} if shape.blocking else {})}


def plan(args: argparse.Namespace) -> list[str]:
    """Lines for people: what would run, about how long."""
    clients = clients_of(args.tasks, args.shapes)
    beside = ENGINE_SETTING if args.engine == "vllm" else ", ".join(SETTINGS)
    total = START_S + REFERENCE_S + END_S + (ENGINE_S if args.engine == "vllm" else 0)
    lines = [f"beside: {beside}; a float32 reference of {', '.join(args.tasks)} first, in a client of its own"]
    for name, rows in clients.items():
        seconds = CLIENT_S + sum(row_s(*row) for row in rows)
        total += seconds
        lines.append(f"client {name}: about {seconds:.0f} s")
        shapes = dict.fromkeys(shape for _, shape in rows)
        lines += [f"  {shape}: {SHAPES[shape].what}" for shape in shapes]
    cut = "" if total <= args.budget_s else f"; --budget-s {args.budget_s:g} will cut the last rows"
    return [*lines, f"about {total:.0f} s in all{cut}"]

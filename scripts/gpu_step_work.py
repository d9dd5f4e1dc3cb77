"""For `gpu_step_shapes.py`: the client that trains, one row for each task and shape of the step.

Each line that it appends to its log is JSON: a row begins, a fact about it, a cell (a row beside one neighbour), a
failure, its end. So whatever happens to this process, what was measured before is there.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_step_flight import few_in_flight
from gpu_step_model import STEPS, Subject
from gpu_step_neighbour import EngineRounds, StandIn
from gpu_step_plan import SHAPES, Shape, row_s

from mps_trainer.sidecar.gpu.numerics import check_numerics
from mps_trainer.workbench.operations import count_operations

LEAST_STEPS, LONGEST_CELL = 5, 4.0
PRODUCT, PRODUCTS = 4096, 10
Step = Callable[[int], float]


@dataclass
class Trial:
    """A row's step, ready to be measured, and what is known of it."""

    subject: Subject
    step: Step
    facts: dict[str, Any]


def client(rows: list[list[str]], setup: dict[str, Any]) -> dict[str, Any]:
    """Measure (task, shape) after (task, shape); what fails is told and the next one begins, while CUDA works."""
    neighbour = EngineRounds(Path(setup["engine"])) if setup["engine"] else StandIn(
        Path(setup["switch"]), tuple(setup["settings"]))  # fmt: skip
    with Path(setup["log"]).open("a") as log:

        def tell(row: list[str], **what: Any) -> None:
            log.write(json.dumps({"task": row[0], "shape": row[1], **what}) + "\n")
            log.flush()

        for row in rows:
            if time.monotonic() + row_s(*row) > setup["deadline"]:
                tell(row, failed=setup["left_out"])
                continue
            tell(row, begins=True)
            try:
                one_row(row, setup, neighbour, lambda kept=row, **what: tell(kept, **what))
            except Exception as error:  # noqa: BLE001  # whatever a shape cannot do is that row's result
                tell(row, failed=f"{type(error).__name__}: {str(error)[:300]}")
                failed = True
            else:
                tell(row, ends=True)
                failed = False
            # Outside of the handler: its traceback would hold the memory of the row.
            clean_up(setup["device"])
            if failed and not still_works(setup["device"]):
                break
    return {}


def one_row(row: list[str], setup: dict[str, Any], neighbour: Any, tell: Callable[..., None]) -> None:
    """All cells of a task and shape."""
    shape, device = SHAPES[row[1]], setup["device"]
    if shape.needs_cuda and not device.startswith("cuda"):
        raise NotImplementedError("needs CUDA")
    if "nobody" in neighbour.settings:
        neighbour.enter("nobody")
    bound = few_in_flight(shape.in_flight) if shape.in_flight else nullcontext()
    with surroundings(shape, device), bound:
        subject = Subject(row[0], setup["sizes"], device, Path(setup["reference"]))
        trial = make(subject, shape)
        tell(facts={**trial.facts, **facts_of(shape, device)})
        try:
            for setting in neighbour.settings:
                tell(cell={"beside": setting, **cell(trial, neighbour, setting, setup["cell_s"])})
        finally:
            if "nobody" in neighbour.settings:
                neighbour.enter("nobody")
            wait(device)


@contextmanager
def surroundings(shape: Shape, device: str) -> Iterator[None]:
    """A stream of its own; of a green context where the shape asks for one."""
    if not device.startswith("cuda"):
        yield
        return
    torch.zeros(1, device=device)
    with ExitStack() as stack:
        if shape.green:
            from torch.cuda.green_contexts import GreenContext

            context = GreenContext.create(num_sms=shape.green, device_id=0)
            # Backward would run in a thread that knows nothing of the green context.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if hasattr(context, "Stream"):
                stack.enter_context(torch.cuda.stream(context.Stream()))
            else:
                context.set_context()
                stack.callback(context.pop_context)
        else:
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))  # type: ignore[no-untyped-call]
        stack.callback(wait, device)
        yield


def make(subject: Subject, shape: Shape) -> Trial:
    """The step of a shape, its kernels loaded."""
    if shape.compiled:
        subject.callee = torch.compile(subject.model, dynamic=False)
    if shape.graph:
        subject.adamw(fused=True, capturable=True)
    else:
        subject.adamw(**{shape.optimizer: True})
    step = eager(subject, shape.pieces)
    began = time.monotonic()
    for number in range(2):
        step(number)
    facts: dict[str, Any] = {"first steps, s": round(time.monotonic() - began, 2)}
    # Under the counter a compiled model would be run as if it were not.
    facts["operations"] = None if shape.compiled else count_operations(lambda: step(0))
    if shape.graph:
        step, facts["nodes of the graph"] = captured(subject)
    return Trial(subject, step, facts)


def eager(subject: Subject, pieces: int) -> Step:
    """A step as PyTorch takes it; between pieces the device is waited for."""
    optimizer = subject.optimizer
    assert optimizer is not None

    def step(number: int) -> float:
        subject.load(number)
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for piece in range(pieces):
            loss = subject.loss(piece, pieces) / pieces if pieces > 1 else subject.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            if pieces > 1:
                wait(subject.device.type)
        optimizer.step()
        value = sum(float(loss.item()) for loss in losses)
        wait(subject.device.type)
        return value

    return step


def captured(subject: Subject) -> tuple[Step, int | None]:
    """The whole step as one graph, and the number of its nodes; the optimizer has its state already."""
    optimizer = subject.optimizer
    assert optimizer is not None
    subject.reset()
    optimizer.zero_grad(set_to_none=True)
    wait("cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    # On this very stream: gradients were accumulated here, and a capture must not touch another one.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        loss = subject.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    result = loss.detach()
    graph.instantiate()

    def step(number: int) -> float:
        subject.load(number)
        graph.replay()
        value = float(result.item())
        wait("cuda")
        return value

    return step, nodes_of(graph)


def nodes_of(graph: Any) -> int | None:
    """Kernels, copies and fills of a graph, as the driver counts them; None when it does not say."""
    count = ctypes.c_size_t(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
            ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
        )
    except (OSError, RuntimeError, AttributeError):
        return None
    return None if status else count.value


def facts_of(shape: Shape, device: str) -> dict[str, Any]:
    """What tells whether a limit of the SMs is real, and whether products are right under it."""
    if not device.startswith("cuda"):
        return {}
    a = torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(PRODUCTS):
        begin = time.perf_counter()
        a @ a
        wait(device)
        times.append((time.perf_counter() - begin) * 1e3)
    found: dict[str, Any] = {
        "SMs": torch.cuda.get_device_properties(0).multi_processor_count, "a product of 4096, ms": round(
            median(times), 4),
    }  # fmt: skip
    if shape.share < 100 or shape.green:
        found["wrong products"] = wrong_products(shape, device)
    return found


@cache
def wrong_products(shape: Shape, device: str) -> str:
    """By the sidecar's own check at start; a second once for each shape."""
    report = check_numerics(torch.device(device))
    return f"{len(report.wrong)} of {report.cases}"


def cell(trial: Trial, neighbour: Any, setting: str, seconds: float) -> dict[str, Any]:
    """Milliseconds of a step beside one neighbour, what is left of its speed, and how far the weights are off."""
    neighbour.enter(setting)
    before = neighbour.alone(setting)
    trial.subject.reset()
    check = trial.subject.compare([trial.step(number) for number in range(STEPS)])
    times: list[float] = []
    finite = True
    since = neighbour.begin()
    begin = last = time.perf_counter()
    longest = LONGEST_CELL if setting != "engine" else 60.0
    while last - begin < longest:
        finite = math.isfinite(trial.step(len(times))) and finite
        now = time.perf_counter()
        times.append((now - last) * 1e3)
        last = now
        if last - begin >= seconds and len(times) >= LEAST_STEPS and neighbour.enough(since):
            break
    beside = neighbour.rate(since) if setting != "nobody" else None
    after = neighbour.alone(setting)
    times.sort()
    found: dict[str, Any] = {
        "steps": len(times), "p50, ms": round(median(times), 3), "p99, ms": round(times[int(len(times) * 0.99)], 3),
        **check, "losses finite": finite,
    }  # fmt: skip
    if before and after and beside is not None:
        alone = (before + after) / 2
        found |= {"neighbour alone, /s": [round(before, 2), round(after, 2)], "kept": round(beside / alone, 4)}
    return found


def clean_up(device: str) -> None:
    """Give back what a row has held; one that is broken says so later."""
    gc.collect()
    if device.startswith("cuda"):
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def wait(device: str) -> None:
    """Until the device has nothing of this row to do."""
    if device.startswith("cuda"):
        torch.cuda.current_stream().synchronize()


def still_works(device: str) -> bool:
    """Whether CUDA can be used after a failure."""
    if not device.startswith("cuda"):
        return True
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device=device).item() == 1)
    except RuntimeError:
        return False

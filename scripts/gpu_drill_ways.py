"""The ways in which a process beside the victim ends: ours, naive ones as the control, and bounds on work in flight.

Each function runs in a fork of the warm parent. It counts its steps in `ready`; then it ends by itself, or somebody
ends it (`gpu_drill_victim.Lane`).
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from gpu_jobs import Counter
from gpu_lab import DEVICE, LARGE
from gpu_work_bound import WorkBound, measure_step_ms
from torch import nn

from mps_trainer.errors import TaskError
from mps_trainer.run import is_held, try_hold
from mps_trainer.sidecar.gpu.safe_end import SafeEnd

GIB = 2**30
LIMIT = 8 * GIB
# Steps before the end: enough for the bound to have measured a step.
STEPS = 8

Step = Callable[[], object]


@dataclass(frozen=True)
class Way:
    """How it ends.

    Attributes:
        statuses: exit statuses that show that it ended in this way; empty: any but 0.
        guarded: a second process holds the lock of the run, and is what gets killed.
    """

    text: str
    function: str
    statuses: tuple[int, ...] = ()
    guarded: bool = False


OURS = {
    "return": Way("return", "ours", (0,)),
    "exception": Way("exception (TaskError)", "ours", (1,)),
    "nan": Way("the loss is NaN", "ours", (1,)),
    "oom": Way("out of memory", "ours", (1,)),
    "os-exit": Way("os._exit in the task", "ours", (7,)),
    "sigterm": Way("SIGTERM", "ours", (0,)),
    "sigint": Way("SIGINT", "ours", (130,)),
    "down": Way("`down`: the supervisor's order of an end", "ours", (0,)),
    "supervisor-killed": Way("the supervisor is killed (SIGKILL)", "ours", (0,), guarded=True),
    "driver-killed": Way("Ray's kill: the driver gets SIGKILL, the supervisor ends us", "ours", (0,), guarded=True),
    "hang-stop": Way("a hang: SIGTERM ignored, stopped, drained, killed by the supervisor", "ours", (-9,)),
    "hang-drained": Way("a hang: stopped, drained, killed (watchdog)", "ours", (-9,)),
    "sigkill-mlp": Way("SIGKILL from outside, small steps", "ours", (-9,)),
    "sigkill-heavy": Way("SIGKILL from outside, heavy steps", "ours", (-9,)),
    "assert": Way("device-side assert", "ours"),
}
NAIVE = {
    "naive-exception": Way("control: an exception with 1.4 s queued", "naive", (1,)),
    "naive-sigkill": Way("control: SIGKILL with 1.4 s queued", "naive", (-9,)),
    "naive-sigterm": Way("control: SIGTERM, no handler, 1.4 s queued", "naive", (-15,)),
}
# How much may be in flight when SIGKILL comes? Each step is waited for; "blocking" has CUDA_LAUNCH_BLOCKING=1.
BOUNDS = {
    name: Way(f"SIGKILL, each step waited for: {name}", "bounded", (-9,))
    for name in (
        "1x0.2ms", "8x0.2ms", "32x0.2ms", "1x5ms", "1x11ms", "transformer", "10x1.4ms-blocking", "transformer-blocking",
    )
}  # fmt: skip
ALL = {**OURS, **NAIVE, **BOUNDS}


def beats(way: str) -> int:
    """Steps after which the process is at work."""
    return 1 if way in NAIVE else 40 if way == "sigkill-mlp" else STEPS


def ours(way: str, ready: str, lock: str) -> None:
    """The sidecar's part: trains under WorkBound and SafeEnd, then ends in one way."""
    device = torch.device(DEVICE)
    step = mlp_step(device) if way == "sigkill-mlp" else heavy_step(device)
    stop = threading.Event()
    # As in the sidecar, where a signal is a wish that the loop grants after a step. SIGINT: as before its loop.
    on_signal = None if way == "sigint" else stop.set
    counter = Counter(Path(ready))
    with SafeEnd(device, on_signal=on_signal):
        bound = WorkBound(device)
        for i in count():
            step()
            if i == STEPS and _ends_by_itself(way, device, step):
                return
            if stop.is_set() or (way == "supervisor-killed" and not is_held(Path(lock))):
                return
            bound.step_done()
            counter.tick(0)


def _ends_by_itself(way: str, device: torch.device, step: Step) -> bool:
    if way == "exception":
        raise TaskError("the task raised", "nothing: this is the drill")
    if way == "nan":
        value = float((torch.ones((), device=device) * math.nan).item())
        if not math.isfinite(value):
            raise TaskError(f"the loss is {value}", "nothing: this is the drill")
    if way == "oom":
        torch.empty(2 * LIMIT, dtype=torch.uint8, device=device)
    if way == "os-exit":
        os._exit(7)
    if way == "assert":
        torch.zeros(4, device=device)[torch.tensor([9], device=device)].sum().item()
    while way in ("hang-stop", "hang-drained"):
        # A task that never comes back and goes on launching, outside of the bound.
        step()
    return way == "return"


def guardian(lock: str) -> None:
    """The supervisor or the driver: holds a lock until it is killed."""
    held = try_hold(Path(lock))
    while held is not None:
        signal.pause()


def naive(way: str, ready: str, lock: str) -> None:
    """What a trainer does that knows nothing of MPS: launches ahead, and ends."""
    a = torch.randn(LARGE, LARGE, device=DEVICE, dtype=torch.bfloat16)
    torch.matmul(a, a)
    torch.cuda.synchronize()
    for _ in range(1000):  # about 1.4 s
        torch.matmul(a, a)
    Counter(Path(ready)).tick(0)
    if way == "naive-exception":
        raise ValueError("a bug")
    signal.pause()


def bounded(way: str, ready: str, lock: str) -> None:
    """Steps of one size, waited for one by one, until the process is killed."""
    if way.startswith("transformer"):
        step = transformer_step(torch.device(DEVICE))
    else:
        times, _, milliseconds = way.partition("ms")[0].partition("x")
        size = {"0.2": 4096, "1.4": 8192, "5": 12288, "11": 16384}[milliseconds]
        a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)

        def step() -> None:
            for _ in range(int(times)):
                torch.matmul(a, a)

    counter = Counter(Path(ready))
    while True:
        step()
        torch.cuda.synchronize()
        counter.tick(0)


def heavy_step(device: torch.device) -> Step:
    """About 14 ms of an H200 in ten kernels."""
    a = torch.randn(LARGE, LARGE, device=device, dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(10):
            torch.matmul(a, a)

    return step


def mlp_step(device: torch.device) -> Step:
    """A step of a small classifier."""
    model = nn.Sequential(nn.Linear(1536, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(256, 1536, device=device), torch.rand(256, 1, device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()

    return step


def transformer_step(device: torch.device) -> Step:
    """A training step of a reward model: 12 layers, 125 M parameters, bf16, 16 x 512 tokens."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True, dropout=0.0)
    model = nn.Sequential(nn.Embedding(50000, 768), nn.TransformerEncoder(layer, 12), nn.Linear(768, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 50000, (16, 512), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()

    return step


def speed(kind: str) -> float:
    """Milliseconds of a step alone, waited for."""
    device = torch.device(DEVICE)
    step = {"mlp": mlp_step, "heavy": heavy_step, "transformer": transformer_step}[kind](device)
    for _ in range(5):
        step()
    return measure_step_ms(step, device, repeats=20)  # type: ignore[arg-type]

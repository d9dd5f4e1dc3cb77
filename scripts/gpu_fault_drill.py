#!/usr/bin/env python3
"""Does a sidecar that ends, in any way, harm the process beside it?

    python scripts/gpu_fault_drill.py [--trials 20] [--lanes 2] [--budget-s 300] [--out RESULT.json]

A victim multiplies matrices on the GPU and checks every product. Beside it a sidecar trains and ends in one way. Our
ways use the sidecar's own code (`sidecar.gpu.safe_end`, `mps.process`); the naive ways, which use none of it, are
the control: if none of them kills a victim, the drill proves nothing. Lanes run side by side, each with a daemon,
a victim and a warm parent of its own; with two GPUs, on both.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from gpu_lab import Job, WarmParent, gpu_uuids, machine

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import sidecar_env
from mps_trainer.mps.folder import MpsFolder
from mps_trainer.mps.placement import GpuPlacement

OURS = (
    "return",
    "exception",
    "out of memory",
    "SIGTERM",
    "SIGINT",
    "hang, killed drained",
    "SIGKILL, mlp steps",
    "SIGKILL, heavy steps",
    "device-side assert",
)
# How much may be in flight when SIGKILL comes? "sync" waits after each step; "blocking" has CUDA_LAUNCH_BLOCKING=1.
BOUNDS = (
    "SIGKILL, sync, 1 x 0.2 ms",
    "SIGKILL, sync, 8 x 0.2 ms",
    "SIGKILL, sync, 32 x 0.2 ms",
    "SIGKILL, sync, 1 x 5 ms",
    "SIGKILL, sync, 1 x 11 ms",
    "SIGKILL, sync, transformer",
    "SIGKILL, blocking, 10 x 1.4 ms",
    "SIGKILL, blocking, transformer",
)
NAIVE = ("naive exception", "naive SIGKILL", "naive SIGTERM")
LIMIT = 8 * 2**30


class Counter:
    """Iterations, wrong results and a wish to stop, shared through a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(24))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 24)

    def _get(self, i: int) -> int:
        return int(struct.unpack_from("q", self._map, 8 * i)[0])

    def _set(self, i: int, value: int) -> None:
        struct.pack_into("q", self._map, 8 * i, value)

    value = property(lambda self: self._get(0))
    errors = property(lambda self: self._get(1))
    stopping = property(lambda self: self._get(2))

    def tick(self, wrong: int) -> None:
        self._set(1, self.errors + wrong)
        self._set(0, self.value + 1)

    def reset(self) -> None:
        for i in range(3):
            self._set(i, 0)

    def stop(self) -> None:
        self._set(2, 1)

    def wait_for(self, value: int, timeout_s: float, job: Job | None = None) -> bool:
        """Whether the count reached `value` in time, while the job (if one is given) lived."""
        deadline = time.monotonic() + timeout_s
        while self.value < value:
            if time.monotonic() > deadline or (job is not None and not job.process.is_running):
                return False
            time.sleep(0.01)
        return True


def victim(path: str) -> None:
    import torch

    counter = Counter(Path(path))
    device = torch.device("cuda:0")
    generator = torch.Generator(device=device).manual_seed(1)
    a = torch.randn(1024, 1024, device=device, generator=generator)
    expected = a @ a
    while not counter.stopping:
        out = torch.full_like(expected, float("nan"))
        torch.matmul(a, a, out=out)
        counter.tick(int(not torch.equal(out, expected)))


def _workload(heavy: bool) -> tuple[Any, Any]:
    import torch
    from torch import nn

    device = torch.device("cuda:0")
    if heavy:
        a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

        def step() -> None:  # about 14 ms of an H200
            for _ in range(10):
                torch.matmul(a, a)
    else:
        model = nn.Sequential(nn.Linear(1536, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        x, y = torch.randn(256, 1536, device=device), torch.rand(256, 1, device=device)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step()

    return device, step


def ours(way: str, ready: str) -> None:
    """The sidecar's part of the drill: trains under WorkBound and SafeEnd, then ends in one way."""
    import torch

    from mps_trainer.errors import TaskError
    from mps_trainer.sidecar.gpu.safe_end import SafeEnd, WorkBound

    device, step = _workload(heavy="mlp" not in way)
    stop = threading.Event()
    counter = Counter(Path(ready))
    on_signal = stop.set if way == "SIGTERM" else None
    with SafeEnd(device, on_signal=on_signal):
        bound = WorkBound(device)
        for i in range(10**9):
            step()
            if way == "exception" and i == 30:
                raise TaskError("the loss is NaN")
            if way == "out of memory" and i == 30:
                torch.empty(2 * LIMIT, dtype=torch.uint8, device=device)
            if way == "device-side assert" and i == 30:
                torch.zeros(4, device=device)[torch.tensor([9], device=device)].sum().item()
            if way == "return" and i == 30:
                return
            if way.startswith("hang") and i > 30:
                # A task that never comes back and goes on launching, outside of the bound.
                while True:
                    step()
            if stop.is_set():
                return
            bound.step_done()
            counter.tick(0)


def transformer_step() -> Any:
    """A training step of a reward model: 12 layers, 125 M parameters, bf16, 16 x 512 tokens."""
    import torch
    from torch import nn

    device = torch.device("cuda:0")
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


def bounded(way: str, ready: str) -> None:
    """Steps of one size, waited for one by one, until the process is killed."""
    import torch

    if "transformer" in way:
        step = transformer_step()
    else:
        count, _, milliseconds = way.rpartition(", ")[2].partition(" x ")
        size = {"0.2": 4096, "1.4": 8192, "5": 12288, "11": 16384}[milliseconds.split()[0]]
        a = torch.randn(size, size, device="cuda:0", dtype=torch.bfloat16)

        def step() -> None:
            for _ in range(int(count)):
                torch.matmul(a, a)

    counter = Counter(Path(ready))
    while True:
        step()
        torch.cuda.synchronize()
        counter.tick(0)


def speed(kind: str) -> float:
    """Milliseconds of a step, waited for."""
    import torch

    from mps_trainer.sidecar.gpu.safe_end import measure_step_ms

    device = torch.device("cuda:0")
    step = transformer_step() if kind == "transformer" else _workload(heavy=kind == "heavy")[1]
    for _ in range(5):
        step()
    return measure_step_ms(step, device, repeats=20)


def naive(way: str, ready: str) -> None:
    """What a trainer does that knows nothing of MPS: launches ahead, and ends."""
    import torch

    device = torch.device("cuda:0")
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    torch.matmul(a, a)
    torch.cuda.synchronize()
    for _ in range(1000):  # about 1.4 s
        torch.matmul(a, a)
    Counter(Path(ready)).tick(0)
    if way == "naive exception":
        raise ValueError("a bug")
    signal.pause()


class Lane:
    """A daemon, a victim and a warm parent on one GPU."""

    def __init__(self, folder: Path, uuid: str) -> None:
        folder.mkdir()
        self.parent = WarmParent(folder / "children.log")
        self.daemon = MpsDaemon(MpsFolder(folder / "m"))
        self.daemon.start()
        self.env = sidecar_env(self.daemon.folder.pipe_dir, uuid, LIMIT)
        # What a real sidecar gets: every launch is waited for.
        placement = GpuPlacement(gpu_uuid=uuid, pool=LIMIT, limit=LIMIT)
        self.our_env = placement.environment({}, self.daemon.folder)
        self.counter, self.ready = Counter(folder / "victim"), Counter(folder / "ready")
        self.victim: Job | None = None
        self.notes: list[str] = []

    def trial(self, way: str) -> dict[str, Any]:
        started = time.monotonic()
        victim = self._living_victim()
        self.ready.reset()
        function = "naive" if way in NAIVE else "bounded" if way in BOUNDS else "ours"
        env = self.our_env if way in OURS or "blocking" in way else self.env
        offender = self.parent.start(f"gpu_fault_drill:{function}", way, str(self.ready.path), env=env)
        beats = 1 if way in NAIVE else 20
        up = self.ready.wait_for(beats, 60, offender)
        self._end(way, offender)
        status = offender.wait(30)
        if status is None:
            offender.process.send(signal.SIGKILL)
            status = offender.wait(30)
        wrong = self.counter.errors
        alive = self.counter.wait_for(self.counter.value + 30, 30, victim) and victim.process.is_running
        # A fault may reach the victim a moment later than the end of its cause.
        alive = alive and not victim.process.wait(0.2)
        offender.result_path.unlink(missing_ok=True)
        if not alive:
            self._bury(victim)
        return {
            "way": way, "up": up, "status": status, "victim died": not alive,
            "wrong results": self.counter.errors - wrong if alive else None, "seconds": time.monotonic() - started,
        }  # fmt: skip

    def _end(self, way: str, offender: Job) -> None:
        offender.process.wait(random.random() * 0.05)  # anywhere in a step
        if "SIGKILL" in way:
            offender.process.send(signal.SIGKILL)
        elif "SIGTERM" in way:
            offender.process.send(signal.SIGTERM)
        elif way == "SIGINT":
            offender.process.send(signal.SIGINT)
        elif way.startswith("hang"):
            offender.process.wait(1.5)  # long enough for the launch queue to fill
            offender.process.kill_drained()

    def _living_victim(self) -> Job:
        if self.victim is None:
            self.counter.reset()
            self.victim = self.parent.start("gpu_fault_drill:victim", str(self.counter.path), env=self.env)
            if not self.counter.wait_for(5, 60, self.victim):
                raise RuntimeError(
                    f"no victim: {self.victim.result_path.read_text()}\n{self.daemon.log_tail('server')}"
                )
        return self.victim

    def _bury(self, victim: Job) -> None:
        if victim.wait(5) is None:
            victim.process.send(signal.SIGKILL)
            victim.wait(10)
        self.notes.append(victim.result_path.read_text()[:300])
        victim.result_path.unlink()
        self.victim = None
        # New clients are refused until the server has cleaned up after the fault.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            servers = self.daemon.servers()
            if all(self.daemon.server_status(server).startswith("ACTIVE") for server in servers):
                return
            time.sleep(0.1)

    def close(self) -> None:
        self.counter.stop()
        if self.victim is not None:
            self.victim.wait(20)
            self.victim.result_path.unlink(missing_ok=True)
        self.daemon.quit(force_after_s=5)
        self.parent.__exit__(None, None, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--naive-trials", type=int, default=10)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--bound-trials", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget_s
    # Round by round, so that a budget that ends early cuts all ways alike.
    counts = {
        **dict.fromkeys(OURS, args.trials),
        **dict.fromkeys(NAIVE, args.naive_trials),
        **dict.fromkeys(BOUNDS, args.bound_trials),
    }
    todo = [way for i in range(max(counts.values())) for way, count in counts.items() if i < count]
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    guard = threading.Lock()

    def work(lane: Lane) -> None:
        try:
            while time.monotonic() < deadline:
                with guard:
                    if not todo:
                        return
                    way = todo.pop(0)
                row = lane.trial(way)
                with guard:
                    rows.append(row)
        except (RuntimeError, OSError) as error:
            problems.append(f"{type(error).__name__}: {error}")

    logs, speeds = "", {}
    with tempfile.TemporaryDirectory(prefix="mt-") as name:
        lanes = [Lane(Path(name) / f"{g}{k}", uuid) for g, uuid in enumerate(gpu_uuids()) for k in range(args.lanes)]
        for kind in ("mlp", "heavy", "transformer"):
            for name_of, env in (("free", lanes[0].env), ("blocking", lanes[0].our_env)):
                speeds[f"{kind}, {name_of}"] = lanes[0].parent.start("gpu_fault_drill:speed", kind, env=env).result(60)
        print("ms of a step alone, launches free and blocking:", speeds, flush=True)
        threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for lane in lanes:
            lane.close()
        logs = (Path(name) / "00" / "children.log").read_text()[-3000:]
    notes = sorted({note for lane in lanes for note in lane.notes})
    return _report(rows, {"problems": problems, "notes": notes, "log": logs, "step ms": speeds}, args.out)


def _report(rows: list[dict[str, Any]], extra: dict[str, Any], out: Path | None) -> int:
    problems = extra["problems"]
    table = {}
    print("| how it ended | trials | victims that died | 95 % bound on the rate | wrong results | statuses | s each |")
    print("|---|---|---|---|---|---|---|")
    for way in (*OURS, *NAIVE, *BOUNDS):
        mine = [row for row in rows if row["way"] == way and row["up"]]
        n, died = len(mine), sum(row["victim died"] for row in mine)
        # Exact for zero deaths: the largest rate at which n survivors in a row still happen in 1 of 20 series.
        bound = f"{1 - 0.05 ** (1 / n):.3f}" if n and not died else "-"
        wrong = sum(row["wrong results"] or 0 for row in mine)
        seconds = sorted(row["seconds"] for row in mine) or [0.0]
        table[way] = {"trials": n, "died": died, "wrong": wrong, "never up": sum(r["way"] == way for r in rows) - n}
        print(
            f"| {way} | {n} | {died} | {bound} | {wrong} | {sorted({row['status'] for row in mine}, key=str)} | "
            f"{seconds[len(seconds) // 2]:.1f} |"
        )
    print("problems:", problems, "\nvictims said:", extra["notes"], "\nchildren's log ends:", extra["log"][-300:])
    deaths = sum(table[way]["died"] + table[way]["wrong"] for way in OURS)
    control = sum(table[way]["died"] for way in NAIVE)
    right = deaths == 0 and (control > 0 or not any(table[way]["trials"] for way in NAIVE)) and not problems
    if out:
        facts = {"machine": machine(), "table": table, "rows": rows, **extra, "as wanted": right}
        out.write_text(json.dumps(facts, indent=1))
    print(f"as wanted: {right} (our ways: {deaths} deaths or wrong results; the control: {control} deaths)")
    return 0 if right else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

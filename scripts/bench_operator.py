#!/usr/bin/env python3
"""What the operator costs Trinity: the time of `AuxTrainer.process` and how long it holds up the event loop meanwhile.

    python scripts/bench_operator.py [--experiences 768] [--tokens 1280] [--batches 30] [--out docs/results/operator.md]

A real channel to a real hub in another process, which reads every record and gives it back; mode `feed`. The loop's
delay: a task sleeps a millisecond again and again and notes how much later than that it ran, first with nothing else to
do (the machine's own share), then while batches are processed.
"""

import argparse
import asyncio
import multiprocessing
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from trinity.common.experience import EID, Experience

from mps_trainer.config import load_settings
from mps_trainer.operator import AuxTrainer
from mps_trainer.run import RunRecord, new_run_id, run_paths, try_hold
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import SidecarHub

PROMPT = 128
TICK_S = 0.001


def make_batch(seed, size, tokens):
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for i in range(size):
        ids = torch.randint(0, 150000, (tokens,), generator=generator, dtype=torch.int32)
        batch.append(
            Experience(
                eid=EID(batch=seed, task=i // 8, run=i % 8, suffix="0"), tokens=ids, prompt_length=PROMPT,
                logprobs=-torch.rand(tokens - PROMPT, generator=generator), reward=float(i % 2),
            )
        )  # fmt: skip
    return batch


def read_everything(run_id, settings, control):
    """The other process: a sidecar that acknowledges at once."""
    with SidecarHub(run_id, wire_columns(load_task(settings.task, settings.task_args))) as hub:
        control.send("ready")
        while not control.poll():
            if hub.wait(0.2) and (delivery := hub.receive()) is not None:
                delivery.release()
        hub.close(unlink=True)


async def late(delays):
    """Note in `delays` how many milliseconds late every tick of the event loop is."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(TICK_S)
        delays.append((time.perf_counter() - start - TICK_S) * 1e3)


async def measure(aux, batches, num_batches):
    await aux.prepare()
    idle, busy, took, fed = [], [], [], 0
    ticks = asyncio.create_task(late(idle))
    await asyncio.sleep(2.0)
    ticks.cancel()
    for i in range(num_batches + 2):
        ticks = asyncio.create_task(late(busy if i > 1 else []))
        await asyncio.sleep(2 * TICK_S)
        start = time.perf_counter()
        _, metrics = await aux.process(batches[i % len(batches)])
        if i > 1:
            took.append((time.perf_counter() - start) * 1e3)
            fed += metrics["aux_trainer/fed"]
        await asyncio.sleep(2 * TICK_S)
        ticks.cancel()
        await asyncio.sleep(0.05)
    await aux.close()
    return idle, busy, took, fed


def row(name, values, target):
    p50, p99 = np.percentile(values, [50, 99])
    return f"| {name} | {len(values)} | {p50:.2f} | {p99:.2f} | {max(values):.2f} | {target} |"


def run_once(options):
    settings = load_settings({"task_args": {"max_tokens": options.tokens}, "ring_slots": 4, "ring_slot": "11MiB"})
    run_id = new_run_id()
    paths = run_paths(run_id)
    with tempfile.TemporaryDirectory() as run_dir:
        record = RunRecord(
            run_id=run_id, config="", derived_config="", run_dir=run_dir, ray_namespace="", settings=settings.dump()
        )
        record.save(paths.run_file)
        lock = try_hold(paths.supervisor_lock)
        ours, theirs = multiprocessing.Pipe()
        reader = multiprocessing.get_context("spawn").Process(
            target=read_everything, args=(run_id, settings, theirs), daemon=True
        )
        reader.start()
        if not ours.poll(60):
            raise TimeoutError("the reader says nothing")
        aux = AuxTrainer(
            task_args={"max_tokens": options.tokens}, run_file=str(paths.run_file), ring_slots=4, ring_slot="11MiB"
        )
        batches = [make_batch(seed, options.experiences, options.tokens) for seed in range(4)]
        try:
            return asyncio.run(measure(aux, batches, options.batches))
        finally:
            ours.send("stop")
            reader.join(20)
            lock.release()
            paths.remove()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiences", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=1280)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as state:
        os.environ["MPS_TRAINER_STATE_DIR"] = state
        load = os.getloadavg()[0]
        idle, busy, took, fed = run_once(options)
    lines = [
        "# The operator's cost", "",
        f"`python scripts/bench_operator.py --experiences {options.experiences} --tokens {options.tokens}`, "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"torch {torch.__version__}, load {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end.",
        f"Mode `feed`, built-in task, {options.experiences} experiences of {options.tokens} tokens a batch; "
        f"{fed} of {options.batches * options.experiences} experiences arrived.", "",
        "| milliseconds | samples | p50 | p99 | max | target |", "|---|---|---|---|---|---|",
        row("process()", took, "p50 <= 40"),
        row("delay of the event loop, nothing to do", idle, "the machine's own"),
        row("delay of the event loop, during process()", busy, "p99 <= 15, max <= 30"),
    ]  # fmt: skip
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How long an operator waits for the scores of a batch: from its experiences to a score for each, beside training.

    python scripts/bench_scores.py [--modes sidecar operator] [--device cpu] [--out docs/results/scores.md]

A real sidecar process that scores (or publishes its weights, `score_where: operator`), journals and trains on every
batch, and the operator's own feeder in this process, with one thread for torch, as Ray gives an actor; no Trinity. One
batch follows the other at once, so that each request meets the training steps of the batch before: the hardest case.
`--pause 500` leaves that many milliseconds between two batches. With `--device cuda:0` the sidecar computes there,
without MPS. Beside an engine: start the run with `mps-trainer up`, and measure it with
`--run-file <state>/runs/<run id>.json`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

# What Ray does for an actor that was given no CPUs of its own; before numpy and torch are there.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from mps_trainer.config import load_settings
from mps_trainer.launcher.sidecar_process import sidecar_environment
from mps_trainer.operator.feeder import Feeder
from mps_trainer.operator.recording import RecordedExperience, RecordedId
from mps_trainer.run import RunRecord, new_run_id, run_paths, try_hold

PROMPT = 128
TARGET_MS = 400
START_S = 120


def make_batch(number, size, tokens):
    """Experiences as a workflow makes them."""
    rng = np.random.default_rng(number)
    return [
        RecordedExperience(
            eid=RecordedId(batch=number, task=i // 8, run=i % 8),
            tokens=rng.integers(0, 150000, PROMPT + tokens, dtype=np.int32),
            prompt_length=PROMPT,
            logprobs=-rng.random(tokens, dtype=np.float32),
            reward=float(rng.random() < 0.5),
        )
        for i in range(size)
    ]


def name_anew(batch, number):
    """Every batch is new to the sidecar, and costs no time between two requests."""
    for i, experience in enumerate(batch):
        experience.eid = RecordedId(batch=number, task=i // 8, run=i % 8)
    return batch


@contextmanager
def sidecar(settings, device):
    """A run of our own with its sidecar; the path of its run file."""
    run_id = new_run_id()
    paths = run_paths(run_id)
    with ExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory())
        record = RunRecord(
            run_id=run_id, config="", derived_config="", run_dir=run_dir, ray_namespace="", settings=settings.dump(),
            device=device,
        )  # fmt: skip
        record.save(paths.run_file)
        lock = try_hold(paths.supervisor_lock)
        reader, writer = os.pipe()
        log = stack.enter_context((Path(run_dir) / "sidecar.log").open("ab"))
        command = [sys.executable, "-m", "mps_trainer.sidecar", "--run-file", paths.run_file, "--ready-fd", str(writer)]
        environment = sidecar_environment(record, os.environ)
        child = subprocess.Popen(command, pass_fds=[writer], stdout=log, stderr=log, env=environment)
        os.close(writer)
        try:
            with os.fdopen(reader) as pipe:
                said = json.loads(pipe.readline() or "{}")
            if said.get("state") != "ready":
                raise SystemExit(f"the sidecar did not start: {said}\n{(Path(run_dir) / 'sidecar.log').read_text()}")
            yield paths.run_file
        finally:
            # It notices that its supervisor is gone, saves and removes the run's files.
            lock.release()
            try:
                child.wait(START_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def measure(run_file, options):
    """Rounds of (milliseconds of `exchange`, its metrics) for each batch."""
    settings = load_settings({**RunRecord.load(run_file).settings, "run_file": str(run_file)})
    feeder = Feeder(settings, "")
    feeder.connect()
    rounds, number = [], 0
    batches = [make_batch(seed, options.experiences, options.tokens) for seed in range(8)]
    try:
        for count in [options.warmup, *[options.batches] * options.rounds]:
            found = []
            for _ in range(count):
                number += 1
                batch = name_anew(batches[number % len(batches)], number)
                time.sleep(options.pause / 1e3)
                begin = time.perf_counter()
                exchange = feeder.exchange(batch, want_scores=True)
                found.append(
                    ((time.perf_counter() - begin) * 1e3, exchange.metrics, exchange.age_s(time.monotonic_ns()))
                )
                if np.isnan(exchange.scores).any():
                    raise SystemExit(f"{int(np.isnan(exchange.scores).sum())} scores are missing: {exchange.metrics}")
            rounds.append(found)
    finally:
        feeder.close()
    return rounds[1:]


def row(mode, rounds, target):
    taken = [[ms for ms, _, _ in found] for found in rounds]
    alone = [metrics["score_latency_ms"] for found in rounds for _, metrics, _ in found]
    ages = [age for found in rounds for _, _, age in found]
    p50s, p99s = ([float(np.percentile(found, q)) for found in taken] for q in (50, 99))
    every = np.concatenate(taken)
    p50, p99 = np.percentile(every, [50, 99])
    verdict = "met" if p99 < target else "missed"
    return (
        f"| {mode} | {len(every)} | {p50:.0f} ({min(p50s):.0f} to {max(p50s):.0f}) | {p99:.0f} ({min(p99s):.0f} to "
        f"{max(p99s):.0f}) | {every.max():.0f} | {np.percentile(alone, 99):.0f} | {np.median(ages):.2f} | "
        f"p99 < {target:g}: {verdict} |"
    )


def settings_of(mode, options):
    return load_settings(
        {
            "task_args": {"max_tokens": options.tokens}, "use": "filter", "score_where": mode, "score_timeout": "60s",
            "replay_capacity": 4096, "device": options.device, "cpu_threads": options.cpu_threads,
        }
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=["sidecar", "operator"], default=["sidecar", "operator"])
    parser.add_argument("--experiences", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=1152, help="of each response")
    parser.add_argument("--batches", type=int, default=100, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=10, help="batches that do not count")
    parser.add_argument("--pause", type=float, default=0, help="milliseconds between two batches")
    parser.add_argument("--device", default="cpu", help="of the sidecar: cpu or cuda:<n>")
    parser.add_argument("--cpu-threads", type=int, default=1, help="of the sidecar on the CPU")
    parser.add_argument("--run-file", type=Path, help="measure a run that is up, with the settings that it has")
    parser.add_argument("--target", type=float, default=TARGET_MS, help="milliseconds")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    if options.run_file is not None:
        mode = load_settings(RunRecord.load(options.run_file).settings).score_where
        rows = [row(mode, measure(options.run_file, options), options.target)]
    else:
        rows = []
        with tempfile.TemporaryDirectory() as state:
            os.environ["MPS_TRAINER_STATE_DIR"] = state
            for mode in options.modes:
                with sidecar(settings_of(mode, options), options.device) as run_file:
                    rows.append(row(mode, measure(run_file, options), options.target))
    import torch

    said = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in vars(options).items() if k in SAID)
    lines = [
        "# The time from experiences to scores", "",
        f"`python scripts/bench_scores.py {said}`, {os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}, torch {torch.__version__}, load {load:.1f} at the start, "
        f"{os.getloadavg()[0]:.1f} at the end.", "",
        f"`preference_classifier` without features, {options.experiences} experiences of {options.tokens} response "
        "tokens a batch; the sidecar journals and trains on each (4 steps of 256) while the next one waits for its "
        "scores. Milliseconds, over all rounds (lowest to highest round). `send to scores` leaves the extraction from "
        "the experiences out; `age` is the median over the batches, in seconds.", "",
        "| score_where | batches | p50 | p99 | max | p99, send to scores | age | target |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]  # fmt: skip
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


SAID = ("experiences", "tokens", "batches", "rounds", "pause", "device", "cpu_threads")

if __name__ == "__main__":
    main()

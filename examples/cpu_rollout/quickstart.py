"""A real `trinity run` with the sidecar trainer on the CPU, and a short report of what it learnt and filtered.

Run by scripts/quickstart.sh, or with any Python that has mps-trainer[trinity,report]:
python examples/cpu_rollout/quickstart.py [--work-dir DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from cpu_rollout.private_ray import EXAMPLE_DIR, PrivateRay, example_environment
from cpu_rollout.run_summary import find_run_dir, print_summary, read_jsonl

RUN_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 30.0
_started = time.monotonic()


def say(message: str) -> None:
    """One line of progress."""
    print(f"[{time.monotonic() - _started:4.0f} s] {message}", flush=True)


def make_work_dir(parent: Path) -> Path:
    """A new folder for this run, so that two runs never meet."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    work_dir = parent.resolve() / f"{stamp}-{os.getpid()}"
    work_dir.mkdir(parents=True)
    return work_dir


def call(command: list[str], environment: dict[str, str], log: Path) -> None:
    """Run a command to its end, output to `log`; a failure ends the quickstart with the last lines of it."""
    with log.open("wb") as output:
        answer = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=180
        )
    if answer.returncode != 0:
        fail(f"{' '.join(command)} exited with {answer.returncode}", log)


def fail(message: str, log: Path) -> None:
    """End with the last lines of a log."""
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    raise SystemExit(f"{tail}\n\n{message}; the whole output is in {log}")


@contextlib.contextmanager
def engine(config: Path, environment: dict[str, str], log: Path) -> Iterator[None]:
    """The stand-in for the GPU engine, up inside the block."""
    command = [sys.executable, "-m", "cpu_rollout.start_engine"]
    call([*command, "up", str(config)], environment, log)
    try:
        yield
    finally:
        call([*command, "down", str(config)], environment, log)


def run_trinity(config: Path, environment: dict[str, str], log: Path) -> None:
    """`mps-trainer run`, with a line for each batch that the operator has seen."""
    command = [str(Path(sys.executable).parent / "mps-trainer"), "run", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _follow(process, config.parent, time.monotonic() + RUN_TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
    if process.wait(STOP_TIMEOUT_S) != 0:
        fail(f"mps-trainer run exited with {process.returncode}", log)


def _follow(process: subprocess.Popen[bytes], work_dir: Path, deadline: float) -> None:
    told = 0
    while process.poll() is None:
        if time.monotonic() > deadline:
            say(f"no end after {RUN_TIMEOUT_S:.0f} s: stopping it")
            return
        run_dir = find_run_dir(work_dir)
        batches = read_jsonl(run_dir / "operator.jsonl") if run_dir else []
        for batch in batches[told:]:
            fed, dropped = batch.get("fed", 0), len(batch.get("dropped", ()))
            say(f"batch {batch['batch']}: {batch['seen']} experiences seen, {fed} fed, {dropped} dropped")
        told = len(batches)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)


def main() -> None:
    """Everything, in the order in which it happens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, default=Path(".quickstart"), help="results go to a new folder in it")
    work_dir = make_work_dir(parser.parse_args().work_dir)
    model, config = work_dir / "model", work_dir / "explore.yaml"
    environment = example_environment(model, work_dir)
    environment["CPU_ROLLOUT_NAMESPACE"] = f"cpu_rollout/{work_dir.name}"
    shutil.copy(EXAMPLE_DIR / "explore.yaml", config)  # the launcher writes its derived config beside it

    say(f"results go to {work_dir}")
    say("building a tiny random language model and its tokenizer")
    call(
        [sys.executable, "-m", "cpu_rollout.tiny_model", str(model)],
        {**os.environ, **environment},
        work_dir / "model.log",
    )
    say("starting a private Ray cluster")
    with PrivateRay(environment) as cluster:
        say("starting the rollout engine (a CPU stand-in for vLLM)")
        with engine(config, cluster.environment, work_dir / "engine.log"):
            say("mps-trainer run explore.yaml: sidecar, then trinity run (its first batch comes after about 30 s)")
            run_trinity(config, cluster.environment, work_dir / "run.log")
            say("stopping the engine and Ray")
    say("done")
    run_dir = find_run_dir(work_dir)
    if run_dir is None:
        raise SystemExit(f"the run left no folder under {work_dir}/checkpoints; see {work_dir}/run.log")
    print_summary(run_dir, work_dir)


if __name__ == "__main__":
    main()

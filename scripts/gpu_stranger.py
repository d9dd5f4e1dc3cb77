#!/usr/bin/env python3
"""A foreign CUDA process comes to the GPU of a real run: what happens to the sidecar, and what to the stranger?

    python scripts/gpu_stranger.py [--memory 2GiB] [--out docs/results/gpu_stranger.json]

Two runs as `mps-trainer up` starts them, one after the other on one GPU ($GPU_LAB_GPU picks it), fed without a pause.
In each a process that knows nothing of us, and no client of the daemon, multiplies matrices on that GPU. Wanted with
`mps: auto`: the sidecar is PAUSED, takes no step, says who is there, is not taken for hung although the pause is longer
than `hang_timeout`, and trains again when the process is gone. Wanted with `mps: on`: the run ends FAILED with PID and
command line, and the stranger lives on. Results are printed, and written to --out, as they come; about 50 s.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_lab import DEVICE, lab_gpus, machine
from gpu_real_run import OPTIONAL, Feeding, prepare_environment, status_of, trains, wait_for, what_is_left, write_config

from mps_trainer.launcher.process_titles import command_line
from mps_trainer.launcher.up import RunHandle, prepare, start_run
from mps_trainer.mps.environment import without_mps
from mps_trainer.run import State, Status, is_held

LIMIT_S = 20.0
HANG_S = 4
PAUSE_S = HANG_S + 2.0
# So that `status.json`, written every 2 s, is there for the whole of the pause.
STATUS_S = 2.5
STRANGER = (sys.executable, str(Path(__file__)), "--stranger")


def be_a_stranger() -> int:
    """Import torch, wait for a line, compute until stdin ends."""
    import torch

    print("warm", flush=True)
    sys.stdin.readline()
    a = torch.ones(1024, 1024, device=DEVICE)
    (a @ a).sum().item()
    print("computes", flush=True)
    # Nothing more is said to it: what can be read is the end.
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        (a @ a).sum().item()
    return 0


class Stranger:
    """A process outside of our daemon, which takes its time to import and touches the GPU only when it is told to."""

    def __init__(self, command: Sequence[str]) -> None:
        env = without_mps(dict(os.environ)) | {"CUDA_VISIBLE_DEVICES": lab_gpus()[0].uuid}
        self.child = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.command_line = command_line(self.child.pid)

    def compute(self) -> float:
        """Let it begin; the time at which its first product was there."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        said = [self.child.stdout.readline().strip() for _ in range(2)]
        if said != ["warm", "computes"]:
            raise RuntimeError(f"the stranger said {said} and ended with {self.child.poll()}")
        self.command_line = command_line(self.child.pid)
        return time.monotonic()

    def is_named_in(self, text: str) -> bool:
        return f"process {self.child.pid} ({self.command_line[:200]})" in text

    def end(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


@contextmanager
def fed_run(work: Path, wish: str, memory: str, sidecar_command: Sequence[str]) -> Iterator[RunHandle]:
    config = write_config(work, wish, memory)
    text = config.read_text().replace("mps: on", f"mps: {wish}")
    config.write_text(text.replace(f"hang_timeout: {OPTIONAL['hang_timeout']}", f"hang_timeout: {HANG_S}s"))
    run = start_run(prepare(config), sidecar_command=sidecar_command)
    feeding = Feeding(run.record.run_id)
    try:
        wait_for(trains(run.record), LIMIT_S, "the sidecar trains")
        yield run
    finally:
        feeding.close()
        run.stop(grace_s=30)


def status(run: RunHandle) -> Status:
    found = status_of(run.run_dir)
    if found is None:
        raise RuntimeError(f"no status in {run.run_dir}")
    return found


def with_auto(run: RunHandle, stranger: Stranger) -> dict[str, Any]:
    sidecar = status(run).pid
    came = stranger.compute()
    wait_for(lambda: status(run).state is State.PAUSED, LIMIT_S, f"paused ({run.run_dir})")
    paused = time.monotonic()
    first = status(run)
    wait_for(lambda: time.monotonic() > paused + PAUSE_S, 2 * PAUSE_S, "time passes")
    last = status(run)
    stranger.end()
    gone = time.monotonic()
    wait_for(lambda: status(run).state is State.READY, LIMIT_S, "ready again")
    ready = time.monotonic()
    wait_for(trains(run.record), LIMIT_S, "it trains again")
    after = status(run)
    found: dict[str, Any] = {
        "s from its first product to PAUSED": paused - came, "s paused": gone - paused,
        "s from its end to READY": ready - gone, "reason": first.error,
        "named by PID and command line": stranger.is_named_in(first.error),
        "steps in the pause": last.version - first.version, "s of the pause that the status covers": last.updated
        - first.updated, "restarts": after.restarts, "the same sidecar": after.pid == sidecar,
        "steps after it": after.version - last.version, "error after it": after.error,
    }  # fmt: skip
    found["right"] = (
        found["named by PID and command line"] and found["steps in the pause"] == 0 and not found["restarts"]
        and last.updated - first.updated > PAUSE_S - STATUS_S and found["the same sidecar"]
        and after.version > last.version and not found["error after it"]
    )  # fmt: skip
    return found


def with_on(run: RunHandle, stranger: Stranger) -> dict[str, Any]:
    came = stranger.compute()
    wait_for(lambda: run.supervisor.poll() is not None, 2 * LIMIT_S, f"the run ends ({run.run_dir})")
    ended = time.monotonic()
    last = status(run)
    found: dict[str, Any] = {
        "s from its first product to the end of the run": ended - came, "state": last.state.value,
        "supervisor's exit code": run.supervisor.returncode, "error": last.error,
        "named by PID and command line": stranger.is_named_in(last.error), "restarts": last.restarts,
        "a sidecar lives": is_held(run.paths.sidecar_lock), "the stranger lives": stranger.child.poll() is None,
    }  # fmt: skip
    found["right"] = (
        last.state is State.FAILED and found["named by PID and command line"] and not found["a sidecar lives"]
        and found["the stranger lives"] and not last.restarts
    )  # fmt: skip
    return found


def drill(work: Path, memory: str, out: Path | None, sidecar_command: Sequence[str] = ()) -> dict[str, Any]:
    """Both runs; the results so far are printed and written after each."""
    results: dict[str, Any] = {"machine": machine()}
    begin = time.monotonic()
    prepare_environment(work)
    for wish, look in (("auto", with_auto), ("on", with_on)):
        stranger = Stranger(STRANGER)
        try:
            with fed_run(work, wish, memory, sidecar_command) as run:
                found = look(run, stranger)
        except Exception as error:  # noqa: BLE001  # told with what was found before, and the other run is tried
            found = {"right": False, "failed": f"{type(error).__name__}: {error}"}
        finally:
            stranger.end()
        results[f"mps: {wish}"] = found
        print(json.dumps({f"mps: {wish}": found}, indent=1), flush=True)
        _write(out, results)
    results["left"] = what_is_left()
    results["seconds"] = time.monotonic() - begin
    results["as wanted"] = (
        results["mps: auto"]["right"] and results["mps: on"]["right"] and not any(results["left"].values())
    )
    _write(out, results)
    return results


def _write(out: Path | None, results: dict[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stranger", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stranger:
        return be_a_stranger()
    if not lab_gpus():
        print("needs a GPU, found none")
        return 2
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        work = Path(name)
        try:
            results = drill(work, options.memory, options.out)
        finally:
            if options.out:
                logs = sorted(work.glob("checkpoints/**/s*.log"))
                text = "\n".join(f"== {p}\n{p.read_text(errors='replace')[-20000:]}" for p in logs)
                options.out.with_suffix(".log").write_text(text)
    print(json.dumps({"left": results["left"], "seconds": results["seconds"]}, indent=1))
    print("as wanted:", results["as wanted"])
    return 0 if results["as wanted"] else 1


if __name__ == "__main__":
    sys.exit(main())

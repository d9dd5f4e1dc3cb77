"""A stand-in for the sidecar: the same command line, READY line, locks, status and exit codes, and no training.

`python fake_sidecar.py BEHAVIOUR --run-file PATH --ready-fd N`. What it does is written to `fake.log` in the run
folder, so that a test can see the order of things.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from mps_trainer.run import RunPaths, RunRecord, State, Status, exit_codes, is_held, try_hold


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("--run-file", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--go-fd", type=int, default=-1)
    options = parser.parse_args()
    record, paths = RunRecord.load(options.run_file), RunPaths(options.run_file)
    run_dir = Path(record.run_dir)

    def note(text: str) -> None:
        with (run_dir / "fake.log").open("a") as file:
            file.write(f"{text}\n")

    def tell(**answer: str) -> None:
        os.write(options.ready_fd, (json.dumps(answer) + "\n").encode())

    asked = []
    if options.behaviour in ("slow", "very-slow"):
        # As the real one, which imports torch first: before that a SIGTERM just ends it.
        note(f"slow start {os.getpid()}")
        time.sleep(1.5 if options.behaviour == "slow" else 10)
    signal.signal(signal.SIGTERM, lambda *_: note("SIGTERM") or asked.append(True))
    lock = try_hold(paths.sidecar_lock, str(os.getpid()))
    assert lock is not None
    note(f"start {os.getpid()}")
    if options.behaviour == "task-error":
        tell(state="failed", error="the task does not import", todo="install it")
        return exit_codes.TASK_FAILED
    restarts = Status.load(run_dir).restarts if (run_dir / "status.json").exists() else 0
    if options.behaviour == "crash-at-the-second-start" and restarts == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if options.behaviour == "crash-at-start":
        sys.stderr.write("Segmentation fault in the driver\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if options.behaviour == "exit-0-at-start":
        return exit_codes.OK
    if options.behaviour == "silent":
        time.sleep(300)
    if options.go_fd >= 0:
        Status(run_id=record.run_id, state=State.WAITING, pid=os.getpid(), restarts=restarts).save(run_dir)
        tell(state="waiting")
        if not wait_for_go(options.go_fd, asked):
            Status(run_id=record.run_id, state=State.STOPPED, experiences=32).save(run_dir)
            note("ended while it waited")
            return exit_codes.OK
        note("told to go on")
        if options.behaviour == "silent-when-placed":
            while not asked:
                time.sleep(0.02)
            Status(run_id=record.run_id, state=State.STOPPED, experiences=32).save(run_dir)
            return exit_codes.OK
        if options.behaviour == "task-error-when-placed":
            tell(state="failed", error="the model does not fit", todo="make it smaller")
            return exit_codes.TASK_FAILED
    Status(run_id=record.run_id, state=State.READY, pid=os.getpid(), restarts=restarts).save(run_dir)
    tell(state="ready")
    if options.behaviour == "task-error-later":
        Status(run_id=record.run_id, state=State.FAILED, error="the loss is nan in step 7").save(run_dir)
        return exit_codes.TASK_FAILED
    if options.behaviour == "crash-when-ready":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.behaviour == "exit-0":
        return exit_codes.OK
    if options.behaviour == "idle":
        Status(run_id=record.run_id, state=State.STOPPED, experiences=32).save(run_dir)
        return exit_codes.OK
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if not is_held(paths.supervisor_lock):
            note("supervisor gone")
            break
        if asked and options.behaviour == "fails-when-asked":
            error = "the loss is nan in step 7\n  What to do: lower the learning rate"
            Status(run_id=record.run_id, state=State.FAILED, error=error).save(run_dir)
            return exit_codes.TASK_FAILED
        if asked and options.behaviour == "exit-0-when-asked":
            return exit_codes.OK
        if asked and options.behaviour != "stubborn":
            break
        time.sleep(0.02)
    Status(run_id=record.run_id, state=State.STOPPED, experiences=32).save(run_dir)
    note("saved")
    return exit_codes.OK


def wait_for_go(descriptor: int, asked: list[bool]) -> bool:
    for _ in range(15_000):
        if select.select([descriptor], [], [], 0.02)[0]:
            return os.read(descriptor, 1) != b""
        if asked:
            return False
    raise TimeoutError("nobody told us to go on")


if __name__ == "__main__":
    sys.exit(main())

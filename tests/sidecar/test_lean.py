"""The sidecar is a guest on the rollout's machine: what it takes of it with the default task and settings."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from real_sidecar import token_rows

from mps_trainer.run import Status

BATCH_ROWS = 128
CHANGED = (sys.executable, str(Path(__file__).parent / "changed.py"))


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def wait_for(run: Any, condition: Any, limit_s: float = 90) -> Status:
    deadline = time.monotonic() + limit_s
    while not condition(status := run.status()):
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    found: Status = status
    return found


def long_rows(number: int) -> dict[str, Any]:
    """Rows whose responses are as long as the default task reads."""
    rows = token_rows(np.random.default_rng(number), BATCH_ROWS, BATCH_ROWS * number)
    rng = np.random.default_rng(number)
    rows["tokens"] = [rng.integers(0, 50_000, 4096).astype(np.int32) for _ in range(BATCH_ROWS)]
    rows["logprobs"] = [-rng.random(4096).astype(np.float32) for _ in range(BATCH_ROWS)]
    return rows


def test_the_default_sidecar_is_a_small_guest(make_run: Any) -> None:
    # make_run's small task_args make way for the defaults.
    run = make_run(task_args={})
    begin = time.monotonic()
    child, ready = run.start()
    start_s, start_cpu = time.monotonic() - begin, cpu_seconds(psutil.Process(child.pid))
    assert ready == {"state": "ready"}
    with run.channel(slot_bytes=run.settings.ring_slot) as channel:
        run.wait_for_attach(channel)
        process = psutil.Process(child.pid)
        for number in range(2):
            channel.send(long_rows(number), request_id=number, want_scores=False)
        wait_for(run, lambda status: status.batches == 2)
        threads, resident = process.num_threads(), process.memory_info().rss
        high_water = peak_bytes(child.pid)
        # The least of some: a checkpoint may still be under way, and other processes cost it time as well.
        idle_share = 1.0
        for _ in range(10):
            idle_cpu, idle_since = cpu_seconds(process), time.monotonic()
            time.sleep(3)
            idle_share = min(idle_share, (cpu_seconds(process) - idle_cpu) / (time.monotonic() - idle_since))
            if idle_share < 0.02:
                break
    print(
        f"start {start_s:.1f} s ({start_cpu:.1f} s of a core), "
        f"resident {resident / 2**20:.0f} MiB (peak {high_water / 2**20:.0f}), "
        f"{threads} threads, idle {100 * idle_share:.2f} % of a core"
    )
    assert start_cpu < 90
    assert resident < 1.2 * 2**30
    assert high_water < 1.2 * 2**30
    assert threads <= 4
    assert idle_share < 0.1


def test_training_keeps_to_cpu_threads(make_run: Any) -> None:
    run = make_run(task_args={}, steps_per_batch=100_000)
    child, _ = run.start(*CHANGED, "drain", "0.5")
    with run.channel(slot_bytes=run.settings.ring_slot) as channel:
        run.wait_for_attach(channel)
        channel.send(long_rows(0), request_id=0, want_scores=False)
        wait_for(run, lambda status: status.version > 0)
        process = psutil.Process(child.pid)
        before = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
        begin, used = time.monotonic(), cpu_seconds(process)
        # The clock of a process counts in hundredths of a second.
        while cpu_seconds(process) < used + 1.5:
            assert time.monotonic() < begin + 90, "it takes no steps"
            time.sleep(0.5)
        cores = (cpu_seconds(process) - used) / (time.monotonic() - begin)
        shares = [t.user_time + t.system_time - before.get(t.id, 0) for t in process.threads()]
        # On a busy machine threads take turns on few cores: so the threads that worked are counted too.
        workers = sum(share > 0.1 * sum(shares) for share in shares)
        assert run.status().batches == 0, "it was to be amid the batch's steps"
    print(f"{cores:.2f} cores, {workers} threads while training with cpu_threads 1 of {os.cpu_count()}")
    assert workers <= run.settings.cpu_threads
    assert cores < run.settings.cpu_threads + 0.1


def peak_bytes(pid: int) -> int:
    """The largest resident size of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

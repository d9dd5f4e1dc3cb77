"""The rounds of `gpu_poison.py`: a good batch, a poisoned one and a good one again, and the memory meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_lab import lab_gpus
from gpu_poison_task import GOOD, Poisoned, rows

from mps_trainer.launcher.runs import RunView
from mps_trainer.run import State, Status
from mps_trainer.tasks import wire_columns
from mps_trainer.transport import OperatorChannel, RingSettings


class Watcher(threading.Thread):
    """Memory of the GPU and of each process on it, twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.used: dict[int, list[int]] = {}
        self.total: list[int] = []

    def run(self) -> None:
        while not self.stop.wait(0.5):
            gpu = lab_gpus()[0]
            self.total.append(gpu.used)
            for process in gpu.processes:
                self.used.setdefault(process.pid, []).append(process.used)


def wait_until(condition: Callable[[], Any], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def memory_of(pid: int) -> int | None:
    return next((process.used for process in lab_gpus()[0].processes if process.pid == pid), None)


class Drill:
    """One run, its channel and perhaps a victim."""

    def __init__(self, run: RunView, on_gpu: bool) -> None:
        self.run_dir = Path(run.record.run_dir)
        self.on_gpu = on_gpu
        ring = RingSettings(num_slots=8, slot_bytes=2**16)
        self.channel = OperatorChannel.create(
            run.record.run_id, wire_columns(Poisoned()), ring, backpressure="block", block_timeout_s=20
        )
        self.request = 0

    def status(self) -> Status:
        return Status.load(self.run_dir)

    def feed(self, mark: float = GOOD, limit_s: float = 30.0) -> bool:
        """Send a batch; whether its scores came."""
        self.request += 1
        name = f"batch{self.request}"
        self.channel.send(rows(name, mark), request_id=self.request, want_scores=True)
        return self.channel.receive_scores(self.request, timeout_s=limit_s) is not None

    def is_back_after(self, before: Status) -> bool:
        now = self.status()
        ready = now.restarts > before.restarts and now.state is State.READY and self.channel.sidecar_alive()
        return ready and now.set_aside > before.set_aside

    def poison(self, way: str, mark: float) -> dict[str, Any]:
        """A good batch, the poisoned one, and a good one again."""
        before = self.status()
        good = self.feed()
        wait_until(lambda: self.status().version >= before.version + 4, 10)
        memory = memory_of(before.pid) if self.on_gpu else None
        marked = f"batch{self.request + 1}-3"
        started = time.monotonic()
        # The scores of a batch that dies in loss() come before; those of the others never.
        self.feed(mark, limit_s=1.0)
        back = wait_until(lambda: self.is_back_after(before), 45)
        later = self.feed()
        seconds = time.monotonic() - started
        status = self.status()
        trained = wait_until(
            lambda: self.status().version > status.version or self.status().batches > status.batches, 10
        )
        aside = [json.loads(path.read_text()) for path in (self.run_dir / "set_aside").glob("*.json")]
        mine = [facts for facts in aside if marked in facts["eids"]]
        status = self.status()
        return {
            "way": way, "batch before scored": good, "came back": back, "batch after scored": later,
            "batch after trained on": trained, "seconds from poison to the next scores": seconds,
            "set aside": [{**facts, "eids": len(facts["eids"])} for facts in mine], "marked": marked,
            "named in status": marked.rpartition("-")[0] in status.last_death, "last death": status.last_death,
            "sidecar memory before and after, bytes": [memory, memory_of(status.pid) if self.on_gpu else None],
        }  # fmt: skip

"""A run of one's own for each test: state folder, run file, supervisor's lock, and the real sidecar process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mps_trainer.config import load_settings
from mps_trainer.launcher.sidecar_process import sidecar_environment
from mps_trainer.run import HeldLock, RunPaths, RunRecord, Status, new_run_id, run_paths, try_hold
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import OperatorChannel, RingSettings, leftovers

#: `python -m mps_trainer.sidecar` with more time for the drain, in which a slow machine must take every step too, and
#: for a mutex that a test's process is held up in.
PATIENT = (
    "import sys; from mps_trainer.sidecar import draining; draining.DRAIN_S = 90.0; "
    "from mps_trainer.transport import locks; locks.MUTEX_S = 30.0; "
    "from mps_trainer.sidecar.__main__ import main; sys.exit(main())"
)
SMALL_TASK = {"task_args": {"max_tokens": 64, "num_buckets": 64, "hidden_size": 32}}


def token_rows(rng: np.random.Generator, size: int, first: int = 0, vocabulary: int = 50) -> dict[str, Any]:
    """`size` experiences whose reward follows from the tokens: more low ids than the median response."""
    tokens = [rng.integers(0, vocabulary, rng.integers(8, 48)).astype(np.int32) for _ in range(size)]
    share = np.array([(row < vocabulary // 2).mean() for row in tokens])
    reward = (share > (np.median(share) if size else 0)).astype(np.float32)
    return {
        "eid": [f"e{first + i}" for i in range(size)],
        "group": [f"t{i // 8}" for i in range(size)],
        "reward": reward,
        "outcome": reward,
        "baseline": np.full(size, reward.mean() if size else 0, np.float32),
        "tokens": tokens,
        "logprobs": [rng.standard_normal(len(row)).astype(np.float32) for row in tokens],
    }


class Run:
    """One run: what the launcher and the supervisor would have made."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.run_id = new_run_id()
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.settings = load_settings({**SMALL_TASK, **settings})
        self.paths: RunPaths = run_paths(self.run_id)
        self.record = RunRecord(
            run_id=self.run_id,
            config="",
            derived_config="",
            run_dir=str(self.run_dir),
            ray_namespace="",
            settings=self.settings.dump(),
        )
        self.record.save(self.paths.run_file)
        lock = try_hold(self.paths.supervisor_lock)
        assert lock is not None
        self.supervisor: HeldLock = lock
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        """The sidecar, and what it wrote on the ready descriptor ({} when it died without a word)."""
        reader, writer = os.pipe()
        command = command or (sys.executable, "-c", PATIENT)
        arguments = [*command, "--run-file", str(self.paths.run_file), "--ready-fd", str(writer)]
        environment = sidecar_environment(self.record, os.environ)
        with (self.run_dir / "sidecar.log").open("ab") as log:
            child = subprocess.Popen(arguments, pass_fds=[writer], stdout=log, stderr=log, env=environment)
        self.children.append(child)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            line = pipe.readline()
        return child, json.loads(line) if line else {}

    def channel(self, num_slots: int = 4, slot_bytes: int = 2**18, **options: Any) -> OperatorChannel:
        columns = wire_columns(load_task(self.settings.task, self.settings.task_args))
        ring = RingSettings(num_slots=num_slots, slot_bytes=slot_bytes)
        options = {"backpressure": "block", "block_timeout_s": 90} | options
        return OperatorChannel.create(self.run_id, columns, ring, **options)

    @staticmethod
    def wait_for_attach(channel: OperatorChannel, limit_s: float = 90) -> None:
        deadline = time.monotonic() + limit_s
        while not channel.sidecar_alive():
            assert time.monotonic() < deadline, "the sidecar did not attach"
            time.sleep(0.01)

    def status(self) -> Status:
        return Status.load(self.run_dir)

    def log(self) -> str:
        return (self.run_dir / "sidecar.log").read_text()

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def end(self) -> None:
        self.supervisor.release()
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(120)
            if child.poll() is None:
                child.kill()
                child.wait()


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MPS_TRAINER_STATE_DIR", str(tmp_path / "state"))
    runs: list[Run] = []

    def make(**settings: Any) -> Run:
        runs.append(Run(tmp_path, settings))
        return runs[-1]

    yield make
    for run in runs:
        run.end()
        assert leftovers(run.run_id) == []

"""A rollout engine in a process of its own: started once, asked for one batch at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mps_trainer.bench.load import Batch
from mps_trainer.bench.processes import process_tree
from mps_trainer.errors import RunError
from mps_trainer.launcher.process import describe_exit, spawn, stop

_COMMAND = (sys.executable, "-m", "mps_trainer.bench.engine_main")
_LOOK_S = 1.0


@dataclass(frozen=True)
class BatchResult:
    """One generated batch; times of the machine's monotonic clock, in seconds.

    Attributes:
        digest: of the tokens that must be the same in every arm.
        not_finite: log-probabilities that are no numbers.
        step_ms, step_rows: the time of each token step, and how many sequences got a token in it.
    """

    begin: float
    end: float
    tokens: int
    digest: str
    not_finite: int
    step_ms: tuple[float, ...]
    step_rows: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return self.end - self.begin

    def token_ms(self, share: float) -> float:
        """Quantile of the time per output token: each sequence counts each of its tokens."""
        order = np.argsort(self.step_ms)
        weights = np.cumsum(np.asarray(self.step_rows)[order])
        return float(np.asarray(self.step_ms)[order][np.searchsorted(weights, share * weights[-1])])


class EngineProcess:
    """One engine.

    Args:
        name: for messages and the log's file.
        spec: for `engine_main.make_engine`.
        env: of the process; it says whether it is an MPS client.
        folder: where its log goes.
    """

    def __init__(self, name: str, spec: Mapping[str, Any], env: Mapping[str, str], folder: Path) -> None:
        self.name, self.log = name, folder / f"engine-{name}.log"
        self.facts: dict[str, Any] = {}
        child_reads, self._asking = os.pipe()
        self._answers, child_writes = os.pipe()
        self._buffer = b""
        command = [*_COMMAND, "--spec", json.dumps(spec), "--read", str(child_reads), "--write", str(child_writes)]
        try:
            self._child = spawn(command, env=env, log=self.log, pass_fds=(child_reads, child_writes))
        finally:
            os.close(child_reads)
            os.close(child_writes)

    @property
    def pid(self) -> int:
        """Of the process that was started; a vLLM engine has children."""
        return self._child.pid

    def wait_ready(self, timeout_s: float) -> None:
        """RunError with the end of its log when it does not come up."""
        self.facts = self._read(timeout_s, "ready")

    def run(self, batch: Batch, timeout_s: float) -> BatchResult:
        """Generate one batch; RunError when the engine died or is silent."""
        asked = {
            "seed": batch.seed,
            "requests": [(r.arrival_s, r.prompt_tokens, r.response_tokens) for r in batch.requests],
        }
        try:
            os.write(self._asking, json.dumps(asked).encode() + b"\n")
        except BrokenPipeError:
            raise self._problem("has ended") from None
        found = self._read(timeout_s, "done with a batch")
        steps = tuple(found.pop("step_ms")), tuple(found.pop("step_rows"))
        return BatchResult(**found, step_ms=steps[0], step_rows=steps[1])

    def close(self) -> None:
        """It ends when nobody can ask any more; harder ways follow."""
        if self._asking >= 0:
            os.close(self._asking)
            self._asking = -1
            # vLLM's own children end with their parent as a rule; psutil never takes a successor's PID for theirs.
            children = process_tree([self.pid])[1:]
            stop(self._child, grace_s=20.0, gpu_drain_s=2.5)
            os.close(self._answers)
            for child in psutil.wait_procs(children, timeout=10.0)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.terminate()

    def _read(self, timeout_s: float, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if time.monotonic() > deadline:
                raise self._problem(f"is not {what} after {timeout_s:.0f} s")
            if select.select([self._answers], [], [], _LOOK_S)[0]:
                chunk = os.read(self._answers, 2**20)
                if not chunk:
                    raise self._problem("has ended")
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _problem(self, what: str) -> RunError:
        code = self._child.poll()
        end = f" ({describe_exit(code)})" if code is not None else ""
        tail = self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""
        return RunError(f"the engine {self.name} {what}{end}: {tail}", f"see {self.log}")

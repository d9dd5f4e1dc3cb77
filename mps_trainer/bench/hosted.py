"""Trainers that are no sidecar: inside the operator, and behind a REST service. The near side of `hosted_main`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mps_trainer.bench.feed import Feed, wait_until
from mps_trainer.bench.work import Work, made_up
from mps_trainer.columns import Rows
from mps_trainer.errors import RunError
from mps_trainer.launcher.process import describe_exit, spawn, stop
from mps_trainer.tasks import load_task, wire_columns

_COMMAND = (sys.executable, "-m", "mps_trainer.bench.hosted_main")
_START_S = 120.0
_REST_S = 120.0
_LOG_LINES = 5


class _Hosted:
    """The process, its descriptors and its steps."""

    door = ""

    def __init__(
        self, work: Work, folder: Path, lengths: Sequence[int], *, device: str, threads: int, env: Mapping[str, str]
    ) -> None:
        self._work, self._folder, self._lengths = work, folder, lengths
        self._device, self._threads, self._env = device, threads, env
        self._stack = contextlib.ExitStack()
        self._error = ""
        self.score_ms: list[float] = []
        self._steps_file = folder / f"{self.door}-{device.replace(':', '')}.steps"

    def start(self) -> None:
        """Start it; as `Trainer.start`."""
        child_reads, self._words = os.pipe()
        self._answers, child_writes = os.pipe()
        self.log = self._steps_file.with_suffix(".log")
        self._steps_file.write_bytes(bytes(8))
        command = [
            *_COMMAND, "--door", self.door, "--work", json.dumps(asdict(self._work)),
            "--lengths", json.dumps(list(self._lengths)), "--device", self._device, "--threads", str(self._threads),
            "--steps", str(self._steps_file), "--read", str(child_reads), "--write", str(child_writes),
        ]  # fmt: skip
        env = {**self._env, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self._threads))}
        try:
            self._child = spawn(command, env=env, log=self.log, pass_fds=(child_reads, child_writes))
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self._stack.callback(os.close, self._answers)
        self._stack.callback(self._end)
        self._stack.callback(os.close, self._words)
        self._ready(self._answer(_START_S, "ready"))

    def steps(self) -> int:
        """Training steps so far."""
        return int(struct.unpack("q", self._steps_file.read_bytes())[0])

    def pids(self) -> list[int]:
        """Its process."""
        return [self._child.pid]

    def problem(self) -> str:
        """What was wrong; "" for nothing."""
        return self._error

    def pace_source(self) -> str:
        """None has a pace."""
        return ""

    def close(self) -> None:
        """End it."""
        self._stack.close()

    def _end(self) -> None:
        stop(self._child, grace_s=10.0, gpu_drain_s=0.0 if self._device == "cpu" else 2.5)

    def _ready(self, said: dict[str, Any]) -> None:
        """Do what is left to do once it is up."""

    def _require_alive(self) -> None:
        status = self._child.poll()
        if status is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]) or "nothing in its log"
            what = f"the {self.door} process ended ({describe_exit(status)}), last lines of its log: {tail}"
            raise RunError(what, f"see {self.log}")

    def _answer(self, timeout_s: float, what: str) -> dict[str, Any]:
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise RunError(f"the {self.door} process is not {what} after {timeout_s:.0f} s", f"see {self.log}")
            chunk = os.read(self._answers, 2**16)
            if not chunk:
                tail = self.log.read_text(errors="replace")[-1500:]
                raise RunError(f"the {self.door} process has ended: {tail}", f"see {self.log}")
            line += chunk
        found: dict[str, Any] = json.loads(line)
        return found


class InOperator(_Hosted):
    """Today's way: the operator trains in its own process, one batch after the other."""

    door = "operator"

    def resume(self) -> None:
        """Let experiences come."""
        self._require_alive()
        before = self.steps()
        os.write(self._words, b"go\n")
        wait_until(lambda: self.steps() > before or self._child.poll() is not None, 60, "the operator trains")
        self._require_alive()

    def pause(self) -> None:
        """Let none come, and wait until it is at rest."""
        self._require_alive()
        os.write(self._words, b"pause\n")
        self.score_ms = self._answer(_REST_S, "at rest")["score_ms"]


class RestService(_Hosted):
    """Today's advice: a FastAPI service, asked by an operator over HTTP with one connection that stays open."""

    door = "rest"
    _feed: Feed | None = None

    def close(self) -> None:
        """End it; where what feeds it waits for an answer that does not come, the service first."""
        try:
            if self._feed is not None and not self._feed.end():
                self._end()
        finally:
            super().close()

    def resume(self) -> None:
        """Let experiences come."""
        self._require_alive()
        before = self.steps()
        self._running.resume()
        wait_until(lambda: self.steps() > before or self._running.error, 60, "the service trains")
        self._require_alive()

    def pause(self) -> None:
        """Let none come, and wait until it is at rest."""
        self._running.pause()
        self._require_alive()
        self.score_ms = self._running.score_ms

    def problem(self) -> str:
        """What was wrong; "" for nothing."""
        return self._running.error

    @property
    def _running(self) -> Feed:
        assert self._feed is not None, "start it first"
        return self._feed

    def _ready(self, said: dict[str, Any]) -> None:
        # In a thread of ours as an operator would do it; `hosted_main` imports what the body needs.
        from mps_trainer.bench.hosted_main import pack, to_body

        columns = wire_columns(load_task(self._work.task, self._work.task_args))
        connection = http.client.HTTPConnection("127.0.0.1", said["port"], timeout=_REST_S)

        def post(path: str, rows: Rows) -> Any:
            connection.request("POST", path, to_body(pack(columns, rows)))
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise RunError(f"{path} answered {answer.status}: {text[:300]!r}", f"see {self.log}")
            return json.loads(text)

        def send(rows: Rows) -> None:
            post("/train", rows)

        def ask(rows: Rows) -> int:
            scores = post("/score", rows)["scores"]
            return sum(score != score for score in scores)

        records = made_up(columns, self._work.rows, self._lengths, "rest")
        self._feed = feed = Feed(records, send, ask)
        self._stack.callback(connection.close)
        self._stack.callback(feed.close)
        feed.start()

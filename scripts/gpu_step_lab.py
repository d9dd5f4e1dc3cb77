"""For `gpu_step_shapes.py`: daemon, neighbour and clients, and what the clients say as it comes."""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu_engine import Engine
from gpu_lab import Job, WarmParent, gpu_uuids, kill_drained, machine
from gpu_step_neighbour import SETTINGS, Switch
from gpu_step_plan import COMPILE_S, LARGE_SIZES, SHAPES, TINY_SIZES, row_s, variables

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import PIPE_VARIABLE, sidecar_env
from mps_trainer.mps.folder import MpsFolder

GIB = 2**30
MEMORY = {"client": 32 * GIB, "neighbour": 16 * GIB}
LEFT_OUT = "left out: the budget is spent"
#: After the deadline, for a row that began before it.
GRACE_S = 10.0


class Lab:
    """Daemon, warm parent, neighbour and what was found. Inside `with` they run."""

    def __init__(self, args: argparse.Namespace, folder: Path, deadline: float) -> None:
        self.args, self.folder, self.deadline = args, folder, deadline
        self.on_gpu = args.device == "cuda"
        self.device = "cuda:0" if self.on_gpu else "cpu"
        self.found: dict[str, Any] = {"settings": {**vars(args), "out": str(args.out)}, "rows": {}, "problems": []}
        self._stack = ExitStack()
        self._pipe: Path | None = None
        self._uuid = ""
        self.neighbour: Job | None = None
        self.engine: Engine | None = None
        self.switch = Switch(folder / "switch")
        self._lines = 0

    def __enter__(self) -> Lab:
        with ExitStack() as stack:
            if self.on_gpu:
                (self._uuid, *_) = gpu_uuids()
                daemon = MpsDaemon(MpsFolder(self.folder / "m"))
                stack.callback(daemon.quit, force_after_s=5)
                daemon.start()
                self._pipe = daemon.folder.pipe_dir
                self.found["machine"] = machine()
            self.parent = stack.enter_context(WarmParent(self.folder / "log", ["gpu_step_work"]))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.switch.stop()
        if self.neighbour is not None:
            self.neighbour.wait(10)
            self.neighbour.said()
        if self.engine is not None:
            self.engine.close()
        self._stack.close()

    def go_on(self, before: dict[str, Any]) -> None:
        """Take over the rows of an earlier call that had an end."""
        for row in before["rows"]:
            if (row["ends"] or row["failed"]) and row["failed"] != LEFT_OUT:
                self.found["rows"]["/".join([row["task"], row["shape"]])] = row

    def environment(self, limit: int, share: int = 100, priority: int = 1) -> dict[str, str]:
        """Of a client of MPS; empty without a GPU."""
        return sidecar_env(self._pipe, self._uuid, limit, share, priority) if self._pipe else {}

    def start_neighbour(self) -> None:
        """The stand-in, or the engine; RuntimeError when it does not work."""
        if self.args.engine == "vllm" and self.engine is None:
            env = {**os.environ, PIPE_VARIABLE: str(self._pipe)}
            self.engine = Engine(self.folder / "engine", self.args.utilization, env, layers=28, max_tokens=96)
            self.found["engine"] = self.engine.wait_ready(240)
            return
        if self.engine is not None:
            raise RuntimeError(f"the engine has ended:\n{self.engine.log_tail(1000)}")
        self.switch.reset()
        env = self.environment(MEMORY["neighbour"], priority=0)
        self.neighbour = self.parent.start("gpu_step_neighbour:serve", str(self.switch.path), self.device, env=env)
        if not self.switch.wait_for(1, 60, self.neighbour):
            raise RuntimeError(f"the neighbour does not start: {self.neighbour.said()[:500]}")

    def neighbour_lives(self) -> bool:
        """Whether it still runs."""
        if self.engine is not None:
            return self.engine.is_alive
        return self.neighbour is not None and self.neighbour.process.is_running

    def make_reference(self, tasks: list[str]) -> None:
        """In a client of its own with all SMs; RuntimeError when it fails."""
        folder = self.folder / "reference"
        folder.mkdir()
        job = self.parent.start(
            "gpu_step_model:reference", tasks, self.sizes, self.device, str(folder),
            env=self.environment(MEMORY["client"]),
        )  # fmt: skip
        self.found["reference, losses"] = job.result(90)

    @property
    def sizes(self) -> dict[str, Any]:
        """Of the tasks, here."""
        return LARGE_SIZES if self.on_gpu else TINY_SIZES

    def measure(self, rows: list[list[str]]) -> None:
        """A client's rows; in a new client after one that died or hung. Every row has an end afterwards."""
        rows = [row for row in rows if not self._has_ended(row)]
        while rows:
            if time.monotonic() + row_s(*rows[0]) > self.deadline:
                for row in rows:
                    self.note({"task": row[0], "shape": row[1], "failed": LEFT_OUT})
                return
            if not self.neighbour_lives():
                self.found["problems"].append(f"the neighbour died before {rows[0]}")
                self.start_neighbour()
            why = self._one_client(rows)
            begun = [row for row in rows if self._row(row)["begins"]]
            for row in begun or rows:
                if not self._has_ended(row):
                    self.note({"task": row[0], "shape": row[1], "failed": why})
            rows = [row for row in rows if not self._has_ended(row)]

    def _one_client(self, rows: list[list[str]]) -> str:
        """Until it ends or is ended; how it ended."""
        log = self.folder / f"rows-{self._lines}.jsonl"
        self._lines += 1
        setup = {
            "log": str(log), "device": self.device, "sizes": self.sizes, "deadline": self.deadline,
            "settings": SETTINGS, "cell_s": self.args.cell_s, "reference": str(self.folder / "reference"),
            "switch": str(self.switch.path), "engine": str(self.folder / "engine") if self.engine else "",
            "left_out": LEFT_OUT,
        }  # fmt: skip
        share = SHAPES[rows[0][1]].share
        more = {**variables(rows), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        job = self.parent.start(
            "gpu_step_work:client", rows, setup, env={**self.environment(MEMORY["client"], share), **more}
        )
        silent = self.args.silent_s + (max(COMPILE_S.values()) if SHAPES[rows[0][1]].compiled else 0)
        read, heard = 0, time.monotonic()
        while True:
            status = job.wait(0.05)
            lines = log.read_text().split("\n")[:-1] if log.exists() else []
            for line in lines[read:]:
                self.note(json.loads(line))
                heard = time.monotonic()
            read = len(lines)
            if status is not None:
                return f"the client ended with status {status}: {job.said()[:300]}"
            if time.monotonic() > min(heard + silent, self.deadline + GRACE_S):
                kill_drained(job.process, 2.5)
                job.wait(10)
                job.said()
                return f"ended by us, {time.monotonic() - heard:.0f} s after its last word"

    def note(self, line: dict[str, Any]) -> None:
        """Keep a line of a client, print it, write what is known."""
        row = self._row([line["task"], line["shape"]])
        for key in ("begins", "ends", "failed"):
            row[key] = line.get(key, row[key])
        row["facts"] |= line.get("facts", {})
        if "cell" in line:
            row["cells"].append(line["cell"])
        if "begins" not in line:
            print(json.dumps(line), flush=True)
        self.write()

    def write(self) -> None:
        """The whole result, by rename."""
        if self.args.out:
            temporary = self.args.out.with_suffix(".tmp")
            temporary.write_text(json.dumps({**self.found, "rows": list(self.found["rows"].values())}, indent=1))
            temporary.replace(self.args.out)

    def _row(self, row: list[str]) -> dict[str, Any]:
        empty = {
            "task": row[0],
            "shape": row[1],
            "begins": False,
            "ends": False,
            "failed": "",
            "facts": {},
            "cells": [],
        }
        found: dict[str, Any] = self.found["rows"].setdefault("/".join(row), empty)
        return found

    def _has_ended(self, row: list[str]) -> bool:
        found = self._row(row)
        return bool(found["ends"] or found["failed"])

"""`python -m mps_trainer.bench.hosted_main`: a trainer that is no sidecar; started by `bench.hosted`.

    --door operator   the same trainer and replay buffer in the operator's own process, one batch after the other
    --door rest       behind a small FastAPI service: POST /train and POST /score, bodies are npz

It writes its steps so far into the file --steps, as one int64.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mps_trainer.bench.feed import SCORE_EVERY
from mps_trainer.bench.work import Work, made_up
from mps_trainer.columns import Array, Column, PackedBatch, PackedColumn, Rows
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.tasks import load_task, wire_columns


class Host:
    """Trainer and replay buffer as a sidecar has them, without its ring, journal and checkpoints."""

    def __init__(self, work: Work, device: str, threads: int, steps_file: str) -> None:
        torch.set_num_threads(threads)
        self.work = work
        task = load_task(work.task, work.task_args)
        self.columns = wire_columns(task)
        settings = work.settings()
        self._trainer = Trainer(task, work.batch_size, settings.seed, device)
        self._replay = ReplayBuffer(self.columns, settings.replay_capacity, settings.seed)
        self._least = settings.min_experiences
        self._steps = os.open(steps_file, os.O_WRONLY | os.O_CREAT, 0o600)

    def train(self, batch: PackedBatch) -> int:
        """Take a record and the steps that fall due with it; the steps so far."""
        self._replay.add(batch)
        if len(self._replay) >= self._least:
            for _ in range(self.work.steps):
                self._trainer.train_step(self._replay.sample(self.work.batch_size))
                os.pwrite(self._steps, struct.pack("q", self._trainer.step), 0)
        return self._trainer.step

    def score(self, batch: PackedBatch) -> Array:
        """(n,) float32; an error when one is not finite."""
        return self._trainer.score(batch)


def pack(columns: Sequence[Column], rows: Rows) -> PackedBatch:
    """Rows as the trainer takes them."""
    found = {column.name: _pack(column, rows[column.name]) for column in columns}
    return PackedBatch(found, len(rows["eid"]))


def _pack(column: Column, values: Any) -> PackedColumn:
    if column.kind in ("scalar", "vector"):
        return PackedColumn(np.asarray(values, column.dtype))
    text = column.kind == "text"
    parts = [np.frombuffer(v.encode(), np.uint8) if text else np.asarray(v, column.dtype) for v in values]
    offsets = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    return PackedColumn(np.concatenate(parts) if parts else np.empty(0, np.uint8), offsets, is_text=text)


def to_body(batch: PackedBatch) -> bytes:
    """A record as the body of a request."""
    arrays: dict[str, Array] = {}
    for name, column in batch.columns.items():
        arrays[f"{name}.values"] = column.values
        if column.offsets is not None:
            arrays[f"{name}.offsets"] = column.offsets
    body = io.BytesIO()
    np.savez(body, **arrays)
    return body.getvalue()


def from_body(columns: Sequence[Column], body: bytes) -> PackedBatch:
    """What `to_body` made."""
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        found = {
            column.name: PackedColumn(
                arrays[f"{column.name}.values"],
                arrays.get(f"{column.name}.offsets"),
                is_text=column.kind == "text",
            )
            for column in columns
        }
        eids = found["eid"].offsets
    assert eids is not None
    return PackedBatch(found, len(eids) - 1)


def serve_operator(host: Host, lengths: Sequence[int], read: int, write: int) -> None:
    """Train while the last word was "go"; after "pause" say the latencies of scores; end with the descriptor."""
    records = made_up(host.columns, host.work.rows, lengths, f"operator-{os.getpid()}")
    with os.fdopen(write, "w", buffering=1) as answers:
        answers.write(json.dumps({"ready": os.getpid()}) + "\n")
        while word := os.read(read, 64):
            if word.strip() != b"go":
                continue
            score_ms, number = [], 0
            while not _word_waits(read):
                batch = pack(host.columns, next(records))
                if number % SCORE_EVERY == 0:
                    begin = time.monotonic()
                    host.score(batch)
                    score_ms.append(round(1e3 * (time.monotonic() - begin), 3))
                host.train(batch)
                number += 1
            answers.write(json.dumps({"score_ms": score_ms}) + "\n")


def _word_waits(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def serve_rest(host: Host, read: int, write: int) -> None:
    """A FastAPI service on a port of the kernel's choice, which it says; ends with the descriptor `read`."""
    fastapi, uvicorn = importlib.import_module("fastapi"), importlib.import_module("uvicorn")
    app = fastapi.FastAPI()

    async def train(request: Any) -> dict[str, int]:
        return {"step": host.train(from_body(host.columns, await request.body()))}

    async def score(request: Any) -> dict[str, list[float]]:
        return {"scores": host.score(from_body(host.columns, await request.body())).tolist()}

    for function in (train, score):
        # FastAPI reads what a parameter is from its annotation, which this module cannot import at its top.
        function.__annotations__["request"] = fastapi.Request
        app.post(f"/{function.__name__}")(function)
    listener = socket.create_server(("127.0.0.1", 0))
    with os.fdopen(write, "w", buffering=1) as answers:
        answers.write(json.dumps({"port": listener.getsockname()[1]}) + "\n")
    # The operator's connection rests between two windows, for longer than uvicorn's five seconds.
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=24 * 3600)
    server = uvicorn.Server(config)
    threading.Thread(target=_end_when_alone, args=(server, read), daemon=True).start()
    server.run(sockets=[listener])


def _end_when_alone(server: Any, read: int) -> None:
    # A benchmark that was killed ends nobody.
    while os.read(read, 64):
        pass
    server.should_exit = True


def main() -> int:
    """Entry of the process."""
    parser = argparse.ArgumentParser(prog="python -m mps_trainer.bench.hosted_main")
    parser.add_argument("--door", choices=("operator", "rest"), required=True)
    parser.add_argument("--work", type=json.loads, required=True)
    parser.add_argument("--lengths", type=json.loads, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", required=True)
    parser.add_argument("--read", type=int, required=True)
    parser.add_argument("--write", type=int, required=True)
    options = parser.parse_args()
    host = Host(Work(**options.work), options.device, options.threads, options.steps)
    if options.door == "operator":
        serve_operator(host, options.lengths, options.read, options.write)
    else:
        serve_rest(host, options.read, options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

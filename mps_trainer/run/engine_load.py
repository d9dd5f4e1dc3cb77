"""How busy a rollout engine is: a small file `load-<pid>-<engine>` for each engine in the run folder.

Maker: the engine's process, once an iteration (`vllm_plugin/stat_logger.py`). Eater: the sidecar's pace.

    header    512 B   JSON: the GPUs that the engine sees
    sample     64 B   seq | time_ns | iterations | tokens | prefill | running u32 | waiting u32 | - | seq

Totals only grow, so a reader that looks seldom loses nothing between two looks. The same `seq` on both sides of the
sample says that it is whole. Written in place and never mapped, as `doing`: a full disk under a mapping is a SIGBUS,
and that in the rollout's own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "load-"
_HEADER_BYTES = 512
_SAMPLE = struct.Struct("<QqQQQIIQQ")
_TRIES = 4


@dataclass(frozen=True)
class EngineLoad:
    """One look at one engine, or at several as one.

    Attributes:
        at: seconds of CLOCK_MONOTONIC, when its last iteration ended.
        running, waiting: requests after that iteration.
        iterations, tokens, prefill: totals: iterations, generated tokens, prompt tokens computed.
    """

    at: float
    running: int
    waiting: int
    iterations: int
    tokens: int
    prefill: int


class LoadFile:
    """The writer's side.

    Raises:
        OSError: the folder or the disk refuses the file; afterwards nothing raises.
    """

    def __init__(self, run_dir: Path, engine: int, gpus: tuple[str, ...]) -> None:
        header = json.dumps({"gpus": gpus}).encode()
        if len(header) > _HEADER_BYTES:
            header = json.dumps({"gpus": ()}).encode()
        self._path = run_dir / f"{_PREFIX}{os.getpid()}-{engine}"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o600)
        os.posix_fallocate(self._descriptor, 0, _HEADER_BYTES + _SAMPLE.size)
        os.pwrite(self._descriptor, header.ljust(_HEADER_BYTES), 0)
        self._seq = self._iterations = self._tokens = self._prefill = 0

    def write(self, running: int, waiting: int, tokens: int, prefill: int) -> None:
        """One iteration has ended; `tokens` and `prefill` are of this iteration. A disk that refuses costs the note."""
        self._seq += 1
        self._iterations += 1
        self._tokens += tokens
        self._prefill += prefill
        sample = _SAMPLE.pack(
            self._seq, time.monotonic_ns(), self._iterations, self._tokens, self._prefill, running, waiting, 0,
            self._seq,
        )  # fmt: skip
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, sample, _HEADER_BYTES)

    def close(self) -> None:
        """Remove the file: this engine has ended. Calling it again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._path.unlink(missing_ok=True)


class LoadReader:
    """The reader's side: all engines of a run on one GPU, seen as one.

    Args:
        gpu: full UUID; "" takes every engine. One that does not name its GPUs is taken too.
    """

    def __init__(self, run_dir: Path, gpu: str = "") -> None:
        self._run_dir = run_dir
        self._gpu = gpu
        self._open: dict[str, int] = {}

    def find(self) -> None:
        """Look for engines that have come or gone; a listing of the run folder, for now and then."""
        with contextlib.suppress(OSError):
            names = {name for name in os.listdir(self._run_dir) if name.startswith(_PREFIX)}
            for name in self._open.keys() - names:
                os.close(self._open.pop(name))
            for name in names - self._open.keys():
                self._take(name)

    @property
    def knows_any(self) -> bool:
        """Whether an engine's file is there."""
        return bool(self._open)

    def read(self, silent_s: float = float("inf"), lost_s: float = float("inf")) -> EngineLoad | None:
        """The sum of those that are not silent for longer; None when no engine says anything. Microseconds.

        One that is silent counts with its totals and no request: it has ended, sleeps or waits for weights. One whose
        last word was of requests is not counted at all after `lost_s`: it was killed, or cannot write any more.
        """
        now = time.monotonic()
        found = [load for load in map(_read, self._open.values()) if load is not None and load.at <= now]
        found = [load for load in found if now - load.at <= lost_s or not load.running + load.waiting]
        if not found:
            return None
        awake = [load for load in found if now - load.at <= silent_s]
        return EngineLoad(
            max(load.at for load in found), sum(load.running for load in awake), sum(load.waiting for load in awake),
            sum(load.iterations for load in found), sum(load.tokens for load in found),
            sum(load.prefill for load in found),
        )  # fmt: skip

    def close(self) -> None:
        """Close the files. Calling it again does nothing."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _take(self, name: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor = os.open(self._run_dir / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                gpus = json.loads(os.pread(descriptor, _HEADER_BYTES, 0)).get("gpus") or []
            except BaseException:
                os.close(descriptor)
                raise
            if self._gpu and gpus and self._gpu not in gpus:
                # Kept out of `_open`, so that it is looked at again: cheap, and there are few.
                os.close(descriptor)
                return
            self._open[name] = descriptor


def _read(descriptor: int) -> EngineLoad | None:
    for _ in range(_TRIES):
        try:
            seq, at_ns, iterations, tokens, prefill, running, waiting, _, same = _SAMPLE.unpack(
                os.pread(descriptor, _SAMPLE.size, _HEADER_BYTES)
            )
        except (OSError, struct.error):
            return None
        if seq == same:
            return EngineLoad(at_ns / 1e9, running, waiting, iterations, tokens, prefill) if seq else None
    return None

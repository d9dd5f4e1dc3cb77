"""How busy a rollout engine is: a small file `load-<pid>-<engine>-<random>` for each engine of a run.

Maker: the engine's process, once an iteration (`vllm_plugin/stat_logger.py`). Eater: the sidecar's pace.

    header    512 B   JSON: the GPUs that the engine is on, and whether that is sure
    sample     64 B   seq | time_ns | iterations | tokens | prefill | running u32 | waiting u32 | - | seq

They are in `<state folder>/runs/<run id>.load/` and never in the run folder: an engine writes in its event loop, and a
run folder is often on a file server that may stall. The writer holds the file's lock for life, so a file whose lock is
free is a dead engine's, whose last word says nothing any more: a reader removes it. What is left goes with the run.

Totals only grow, so a reader that looks seldom loses nothing between two looks. The same `seq` on both sides of the
sample says that it is whole. Written in place and never mapped, as `doing`: a full disk under a mapping is a SIGBUS,
and that in the rollout's own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.run.locks import hold_descriptor, is_descriptor_held
from mps_trainer.run.record import run_paths

_PREFIX = "load-"
_UNFINISHED = ".new-"
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
        engines: how many this is the sum of.
        located: each of them is known to be on the reader's GPU. False: one may be elsewhere, such as a data parallel
            rank that cannot tell its own GPU, and then iterations of the sum say little of a slowdown here.
    """

    at: float
    running: int
    waiting: int
    iterations: int
    tokens: int
    prefill: int
    engines: int = 1
    located: bool = True


def load_folder(run_dir: Path) -> Path:
    """Where the engines' files of the run are whose run folder is `run_dir`; its name is the run's id."""
    return run_paths(run_dir.name).load_folder


def share_load(run_dir: Path, other: Path) -> None:
    """Let the readers of the run folder `other` hear the engines of `run_dir` too, those that are there now."""
    target = load_folder(other)
    target.mkdir(mode=0o700, exist_ok=True)
    for said in load_folder(run_dir).glob(f"{_PREFIX}*"):
        # Written in place, so both names show what it says now; the lock is the file's and not the name's.
        # There already, or its engine has just ended.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            (target / said.name).hardlink_to(said)


class LoadFile:
    """The writer's side.

    Args:
        gpus: full UUIDs of those that the engine is on; none: nobody knows.
        sure: it is on all of these. False: on some of them.

    Raises:
        OSError, RunError: the folder or the disk refuses the file; afterwards nothing raises.
    """

    def __init__(self, run_dir: Path, engine: int, gpus: tuple[str, ...], *, sure: bool = True) -> None:
        self._descriptor = -1
        header = json.dumps({"gpus": gpus, "sure": sure}).encode()
        if len(header) > _HEADER_BYTES:
            header = json.dumps({"gpus": ()}).encode()
        folder = load_folder(run_dir)
        folder.mkdir(mode=0o700, exist_ok=True)
        # Two engines of one process may have one index.
        name = f"{os.getpid()}-{engine}-{secrets.token_hex(4)}"
        self._path, unfinished = folder / f"{_PREFIX}{name}", folder / f"{_UNFINISHED}{name}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(unfinished, flags, 0o600)
        try:
            hold_descriptor(self._descriptor)
            os.posix_fallocate(self._descriptor, 0, _HEADER_BYTES + _SAMPLE.size)
            os.pwrite(self._descriptor, header.ljust(_HEADER_BYTES), 0)
            # A reader must never see it without its lock.
            unfinished.rename(self._path)
        except BaseException:
            self._let_go()
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        self._seq = self._iterations = self._tokens = self._prefill = 0
        _writers.add(self)

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
            self._let_go()
            self._path.unlink(missing_ok=True)

    def __del__(self) -> None:
        # Its engine was made anew in this process, and its last word must not stand beside the new one's.
        with contextlib.suppress(OSError):
            self.close()

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_writers: weakref.WeakSet[LoadFile] = weakref.WeakSet()


def _leave_to_parent() -> None:
    # A forked child shares the lock's open file: it would keep a dead engine's word alive.
    for file in list(_writers):
        file._let_go()


os.register_at_fork(after_in_child=_leave_to_parent)


class LoadReader:
    """The reader's side: all engines of a run on one GPU, seen as one.

    Args:
        gpu: full UUID; "" takes every engine. One that does not name its GPUs is taken too.
    """

    def __init__(self, run_dir: Path, gpu: str = "") -> None:
        self._folder = load_folder(run_dir)
        self._gpu = gpu
        self._open: dict[str, _Heard] = {}

    def find(self) -> None:
        """Look for engines that have come, gone or died; a listing of a small folder, for now and then."""
        with contextlib.suppress(OSError):
            names = set()
            with contextlib.suppress(FileNotFoundError):
                names = {name for name in os.listdir(self._folder) if name.startswith(_PREFIX)}
            for name in self._open.keys() - names:
                os.close(self._open.pop(name).descriptor)
            for name in names - self._open.keys():
                self._take(name)
            for name in [name for name, heard in self._open.items() if not is_descriptor_held(heard.descriptor)]:
                os.close(self._open.pop(name).descriptor)
                self._remove(name)

    @property
    def knows_any(self) -> bool:
        """Whether an engine's file is there."""
        return bool(self._open)

    def read(self, silent_s: float = float("inf"), lost_s: float = float("inf")) -> EngineLoad | None:
        """The sum of those that are not silent for longer; None when no engine says anything. Microseconds.

        One that is silent counts with its totals and no request: it sleeps or waits for weights. One whose last word
        was of requests is not counted at all after `lost_s`: it hangs, or cannot write any more.
        """
        looks = [(_read(heard.descriptor), heard.located) for heard in self._open.values()]
        # After the reads: what an engine says meanwhile is as true.
        now = time.monotonic()
        found = [(load, located) for load, located in looks if load is not None and load.at <= now]
        found = [
            (load, located) for load, located in found if now - load.at <= lost_s or not load.running + load.waiting
        ]
        if not found:
            return None
        loads = [load for load, _ in found]
        awake = [load for load in loads if now - load.at <= silent_s]
        return EngineLoad(
            max(load.at for load in loads), sum(load.running for load in awake), sum(load.waiting for load in awake),
            sum(load.iterations for load in loads), sum(load.tokens for load in loads),
            sum(load.prefill for load in loads), len(loads), all(located for _, located in found),
        )  # fmt: skip

    def close(self) -> None:
        """Close the files. Calling it again does nothing."""
        while self._open:
            os.close(self._open.popitem()[1].descriptor)

    def _take(self, name: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            # Not to be waited for, whatever has that name: a pipe would never open.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._folder / name, flags)
            try:
                if not is_descriptor_held(descriptor):
                    self._remove(name)
                    os.close(descriptor)
                    return
                header = json.loads(os.pread(descriptor, _HEADER_BYTES, 0))
                gpus, sure = tuple(map(str, header.get("gpus") or ())), bool(header.get("sure"))
            except BaseException:
                os.close(descriptor)
                raise
            if self._gpu and gpus and self._gpu not in gpus:
                # Kept out of `_open`, so that it is looked at again: cheap, and there are few.
                os.close(descriptor)
                return
            self._open[name] = _Heard(descriptor, not self._gpu or (sure and bool(gpus)))

    def _remove(self, name: str) -> None:
        # A name is never given twice, so what is removed is the dead one's.
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()


@dataclass(frozen=True)
class _Heard:
    descriptor: int
    located: bool


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

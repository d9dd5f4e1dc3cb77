"""What trains beside the engine: the real sidecar through the real ring. The other kinds are in `hosted`.

    start > [resume > a window > pause > idle] ... > close

A trainer that is paused has nothing to do and stays where it is, memory included.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mps_trainer.bench.paced import PacedFeed
from mps_trainer.bench.work import Work, made_up
from mps_trainer.columns import Rows
from mps_trainer.errors import AlreadyRunningError, RunError, TransportError
from mps_trainer.launcher.sidecar_process import SidecarProcess
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.run import RunRecord, Status, new_run_id, run_paths, try_hold
from mps_trainer.run.doing import Stage, read_doing
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import OperatorChannel
from mps_trainer.transport.sweep import remove_run

_LOOK_S = 0.02
_SCORE_TIMEOUT_S = 120.0
#: Of records, one in so many asks for scores too.
SCORE_EVERY = 4


class Trainer(Protocol):
    """One way of training."""

    @property
    def score_ms(self) -> list[float]:
        """Latencies of scores in milliseconds, since the last `resume`; whole once it is paused."""

    def start(self) -> None:
        """Until it is ready to train; RunError when it does not get there."""

    def resume(self) -> None:
        """Experiences come from now on, as many as it takes."""

    def pause(self) -> None:
        """None come any more; returns when it has nothing left to do."""

    def steps(self) -> int:
        """Training steps so far."""

    def pids(self) -> list[int]:
        """Its processes, without what feeds it."""

    def problem(self) -> str:
        """What was wrong with its outputs; "" when nothing was."""

    def pace_source(self) -> str:
        """What its pace goes by (`Status.pace_source`); "" without a pace."""

    def close(self) -> None:
        """End it. Calling it again does nothing."""


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    """RunError when `condition()` is not true in time."""
    deadline, never = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise RunError(f"not within {timeout_s:.0f} s: {what}", "see the logs in the folder of the benchmark")
        never.wait(_LOOK_S)


class Feed(threading.Thread):
    """Gives a trainer records without a pause while `going` is set.

    Args:
        send: takes a record; it blocks while the trainer has enough to do.
        ask: the same and waits for scores; the number of those that are not finite.
        hold: called before each.
    """

    def __init__(self, records: Iterator[Rows], send: Any, ask: Any, hold: Any = lambda: None) -> None:
        super().__init__(daemon=True, name="feed")
        self.going, self.idle = threading.Event(), threading.Event()
        self.score_ms: list[float] = []
        self.error, self.sent = "", 0
        self._records, self._send, self._ask, self._hold = records, send, ask, hold
        self._ended = False
        self.idle.set()

    def run(self) -> None:
        """The thread."""
        for number in itertools.count():
            if not self.going.is_set():
                self.idle.set()
                self.going.wait()
            if self._ended:
                return
            try:
                self._give(next(self._records), with_scores=number % SCORE_EVERY == 0)
            except (TransportError, RunError, OSError) as error:
                self.error = self.error or f"{type(error).__name__}: {error}"
                self.idle.set()
                return

    def resume(self) -> None:
        """Let experiences come."""
        self.score_ms = []
        self.idle.clear()
        self.going.set()

    def pause(self, timeout_s: float = _SCORE_TIMEOUT_S) -> None:
        """Let none come, and wait until it is at rest."""
        self.going.clear()
        if not self.idle.wait(timeout_s):
            raise RunError(f"the feed did not come to rest in {timeout_s:.0f} s", "the trainer takes no records")

    def close(self) -> None:
        """End it."""
        self._ended = True
        self.going.set()
        self.join(_SCORE_TIMEOUT_S)

    def _give(self, rows: Rows, *, with_scores: bool) -> None:
        self._hold()
        if not with_scores:
            self._send(rows)
        else:
            begin = time.monotonic()
            bad = self._ask(rows)
            self.score_ms.append(round(1e3 * (time.monotonic() - begin), 3))
            if bad:
                self.error = f"{bad} scores are not finite"
        self.sent += 1


class SidecarTrainer:
    """The product: `python -m mps_trainer.sidecar` behind an `OperatorChannel`.

    Args:
        device: "cpu" or "cuda:<n>".
        settings: more of the operator's args, such as a pace.
        placement: on a GPU that is shared through MPS.
        daemon_pipe: the pipe directory of the daemon that engines and sidecars share.
    """

    def __init__(
        self,
        work: Work,
        folder: Path,
        lengths: Sequence[int],
        *,
        device: str = "cpu",
        settings: dict[str, Any] | None = None,
        placement: GpuPlacement | None = None,
        daemon_pipe: Path | None = None,
    ) -> None:
        self.run_id = new_run_id()
        self._lengths, self._work = lengths, work
        self.run_dir = folder / self.run_id
        self._paths = run_paths(self.run_id)
        more: dict[str, Any] = {"device": device, **({"memory": f"{work.pool // 2**20}MiB"} if device != "cpu" else {})}
        resolved = work.settings(**more, **(settings or {}))
        self._columns = wire_columns(load_task(work.task, work.task_args))
        self._record = RunRecord(
            run_id=self.run_id, config="", derived_config="", run_dir=str(self.run_dir), ray_namespace=self.run_id,
            settings=resolved.dump(), device=device, mps="on" if placement else "off",
        )  # fmt: skip
        self._placement, self._daemon_pipe = placement, daemon_pipe
        self._stack = contextlib.ExitStack()
        self._feed: Feed | None = None
        self._process: SidecarProcess | None = None
        self._ready_timeout = resolved.ready_timeout
        self._pace = PacedFeed(self.run_dir, work.steps, self.steps) if resolved.pace == "on" else None

    def start(self) -> None:
        """Start it; as `Trainer.start`."""
        self.run_dir.mkdir(mode=0o700, parents=True)
        self._record.save(self._paths.run_file)
        lock = try_hold(self._paths.supervisor_lock, "the benchmark")
        if lock is None:
            raise AlreadyRunningError(f"run {self.run_id} is taken", "start the benchmark again")
        self._stack.callback(self._paths.remove)
        self._stack.callback(remove_run, self.run_id)
        self._stack.enter_context(lock)
        self._place()
        self._process = process = SidecarProcess(self._record, self._paths.run_file)
        self._stack.callback(process.stop, 30.0)
        self._wait_ready(process)
        channel = OperatorChannel.create(
            self.run_id, self._columns, self._work.ring(self._columns), backpressure="block", block_timeout_s=2.0
        )
        self._stack.callback(channel.close)
        wait_until(channel.sidecar_alive, 30, f"sidecar {process.pid} attaches to its channel")
        self._channel = channel
        records = made_up(self._columns, self._work.rows, self._lengths, self.run_id)
        self._requests = itertools.count(1)
        # Held back before a score is asked for, so that its latency is the sidecar's.
        hold = partial(self._pace.wait, channel.sidecar_alive) if self._pace is not None else lambda: None
        self._feed = Feed(records, self._send, self._ask, hold)
        self._stack.callback(self._feed.close)
        self._feed.start()

    def resume(self) -> None:
        """Let experiences come."""
        before = self.steps()
        if self._pace is not None:
            self._pace.resume()
        self._running.resume()
        wait_until(lambda: self.steps() > before or self._running.error, 60, "the sidecar trains")

    def pause(self) -> None:
        """Let none come, and wait until it is at rest."""
        self._running.pause()
        if self._pace is not None:
            self._pace.paused()
        wait_until(self._is_idle, 120, "the sidecar has nothing left to do")

    @property
    def score_ms(self) -> list[float]:
        """Latencies of scores since `resume`."""
        return self._running.score_ms

    def steps(self) -> int:
        """Training steps so far."""
        for _ in range(3):
            # A live writer may be faster than a look.
            doing = read_doing(self.run_dir)
            if doing is not None and doing.subject is not None:
                return doing.subject.step
        status = Status.peek(self.run_dir)
        return status.version if status is not None else 0

    def pids(self) -> list[int]:
        """Its process."""
        return [self._process.pid] if self._process is not None else []

    def problem(self) -> str:
        """What was wrong; "" for nothing."""
        status = Status.peek(self.run_dir)
        wrong = status.error if status is not None else "the sidecar wrote no status"
        return self._running.error or wrong

    def pace_source(self) -> str:
        """What its pace went by when it last looked."""
        status = Status.peek(self.run_dir)
        return status.pace_source if status is not None else ""

    def close(self) -> None:
        """End it."""
        self._stack.close()

    @property
    def _running(self) -> Feed:
        assert self._feed is not None, "start it first"
        return self._feed

    def _is_idle(self) -> bool:
        doing = read_doing(self.run_dir)
        waits = doing is not None and doing.stage is Stage.WAITING
        owes = self._pace is not None and self._pace.owes()
        return bool(self._running.error) or (waits and not self._channel.backlog() and not owes)

    def _place(self) -> None:
        if self._placement is None or self._daemon_pipe is None:
            return
        folder = mps_folder(self.run_id)
        folder.path.parent.mkdir(mode=0o700, exist_ok=True)
        folder.path.mkdir(mode=0o700)
        self._stack.callback(folder.remove)
        # All sidecars of a benchmark are clients of one daemon, for engines cannot change theirs.
        folder.pipe_dir.symlink_to(self._daemon_pipe)
        self._placement.save(folder)

    def _wait_ready(self, process: SidecarProcess) -> None:
        deadline = time.monotonic() + self._ready_timeout
        said: list[dict[str, str]] = []
        while process.ready_fd >= 0 and time.monotonic() < deadline:
            if select.select([process.ready_fd], [], [], 0.5)[0]:
                said += process.read_answers()
        if not said or said[-1]["state"] != "ready":
            why = said[-1].get("error", "") if said else process.log_tail()
            raise RunError(f"the sidecar did not get ready: {why}", f"see {process.log}")

    def _send(self, rows: Rows) -> None:
        # Nothing is lost when the sidecar takes longer than the wait of one send.
        while self._channel.send(rows, request_id=next(self._requests), want_scores=False).rows_dropped:
            if not self._channel.sidecar_alive():
                raise RunError("the sidecar has ended", f"see {self.run_dir}/sidecar.log")

    def _ask(self, rows: Rows) -> int:
        while True:
            request = next(self._requests)
            if not self._channel.send(rows, request_id=request, want_scores=True).rows_dropped:
                break
        reply = self._channel.receive_scores(request, _SCORE_TIMEOUT_S)
        if reply is None:
            raise RunError("no scores came", f"see {self.run_dir}/sidecar.log")
        return int((reply.values != reply.values).sum())

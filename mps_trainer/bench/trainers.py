"""What trains beside the engine: the real sidecar through the real ring. The other kinds are in `hosted`.

    start > [resume > a window > pause > idle] ... > close

A trainer that is paused has nothing to do and stays where it is, memory included.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mps_trainer.bench.feed import SCORE_TIMEOUT_S, Feed, wait_until
from mps_trainer.bench.paced import PacedFeed
from mps_trainer.bench.work import Work, made_up
from mps_trainer.columns import Rows
from mps_trainer.errors import AlreadyRunningError, RunError
from mps_trainer.launcher.process import describe_exit
from mps_trainer.launcher.sidecar_process import SidecarProcess
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.run import RunRecord, Status, new_run_id, run_paths, try_hold
from mps_trainer.run.doing import Stage, read_doing
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import OperatorChannel
from mps_trainer.transport.sweep import remove_run

_LOG_LINES = 5
_GRACE_S = 30.0


class Trainer(Protocol):
    """One way of training."""

    @property
    def score_ms(self) -> list[float]:
        """Latencies of scores in milliseconds, since the last `resume`; whole once it is paused."""

    def start(self) -> None:
        """Until it is ready to train; RunError when it does not get there."""

    def resume(self) -> None:
        """Experiences come from now on, as many as it takes; RunError or OSError when it cannot train any more."""

    def pause(self) -> None:
        """None come any more; returns when it has nothing left to do, or raises as `resume`."""

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
        self._stack.callback(process.stop, _GRACE_S)
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
        self._require_alive()
        self._running.resume()
        wait_until(lambda: self.steps() > before or self._running.error or self._end(), 60, "the sidecar trains")
        self._require_alive()

    def pause(self) -> None:
        """Let none come, and wait until it is at rest."""
        self._running.pause()
        self._require_alive()
        if self._pace is not None:
            self._pace.paused()
        wait_until(self._is_idle, 120, "the sidecar has nothing left to do")
        self._require_alive()

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
        if end := self._end():
            return end
        status = Status.peek(self.run_dir)
        wrong = status.error if status is not None else "the sidecar wrote no status"
        return self._running.error or wrong

    def pace_source(self) -> str:
        """What its pace went by when it last looked."""
        status = Status.peek(self.run_dir)
        return status.pace_source if status is not None else ""

    def close(self) -> None:
        """End it; where what feeds it waits for a sidecar that does nothing, be it stopped, the sidecar first."""
        try:
            if self._feed is not None and not self._feed.end() and self._process is not None:
                self._process.stop(_GRACE_S)
        finally:
            self._stack.close()

    @property
    def _running(self) -> Feed:
        assert self._feed is not None, "start it first"
        return self._feed

    def _is_idle(self) -> bool:
        doing = read_doing(self.run_dir)
        waits = doing is not None and doing.stage is Stage.WAITING
        owes = self._pace is not None and self._pace.owes()
        return bool(self._running.error or self._end()) or (waits and not self._channel.backlog() and not owes)

    def _end(self) -> str:
        """How it ended; "" while it lives."""
        status = self._process.child.poll() if self._process is not None else None
        if self._process is None or status is None:
            return ""
        tail = self._process.log_tail(_LOG_LINES) or "nothing in its log"
        return f"the sidecar ended ({describe_exit(status)}), last lines of its log: {tail}"

    def _require_alive(self) -> None:
        if end := self._end():
            raise RunError(end, f"see {self.run_dir}/sidecar.log")
        if self._running.over:
            raise RunError(f"nothing reaches the sidecar: {self._running.error}", f"see {self.run_dir}/sidecar.log")

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
            self._require_receiver()

    def _require_receiver(self) -> None:
        if self._end() or not self._channel.sidecar_alive():
            raise RunError("the sidecar has ended", f"see {self.run_dir}/sidecar.log")

    def _ask(self, rows: Rows) -> int:
        while True:
            request = next(self._requests)
            if not self._channel.send(rows, request_id=request, want_scores=True).rows_dropped:
                break
            self._require_receiver()
        reply = self._channel.receive_scores(request, SCORE_TIMEOUT_S)
        if reply is None:
            raise RunError("no scores came", f"see {self.run_dir}/sidecar.log")
        return int((reply.values != reply.values).sum())

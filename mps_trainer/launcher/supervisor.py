"""`python -m mps_trainer.launcher.supervisor`: the small process that keeps one sidecar alive.

    start > READY within ready_timeout > watch --- killed ----------------> RESTARTING (backoff) > start
                                           |------ exit 0 (idle) ---------> end
                                           |------ task error, bad config > FAILED > end; the rollout goes on
                                           `------ SIGTERM, owner gone ---> SIGTERM, drain, (SIGSTOP,) SIGKILL > end

An end that is asked for between two lives starts one more sidecar, which takes what is in the rings and the journal.
It holds the run's locks for life: whoever wants to know whether the run lives tests those. When it is killed the
locks drop, and the sidecar ends in order by itself. It imports neither torch nor pyarrow and stays small.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mps_trainer.errors import MpsTrainerError, RunError
from mps_trainer.launcher.leftovers import remove_run
from mps_trainer.launcher.process import describe_exit
from mps_trainer.launcher.reports import Reporter
from mps_trainer.launcher.run_locks import Holder, take_run_locks
from mps_trainer.launcher.sidecar_process import SIDECAR_COMMAND, SidecarProcess
from mps_trainer.run import HeldLock, RunPaths, RunRecord, State, Status, exit_codes, is_held

log = logging.getLogger("mps_trainer.supervisor")

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_OWNER_CHECK_S = 0.5
# A life that lasts this long after READY shows that the sidecar can work; what came before no longer counts.
_HEALTHY_S = 600.0
GRACE_S = 30.0


class Supervisor:
    """Keeps one sidecar alive until somebody ends the run."""

    def __init__(
        self,
        record: RunRecord,
        run_file: Path,
        reporter: Reporter,
        *,
        command: Sequence[str] = SIDECAR_COMMAND,
        grace_s: float = GRACE_S,
    ) -> None:
        self._record = record
        self._run_file = run_file
        self._reporter = reporter
        self._command = command
        self._grace_s = grace_s
        self._ready_timeout = float(record.settings["ready_timeout"])
        self._max_restarts = int(record.settings["max_restarts"])
        self._restarts = 0
        self._restarts_in_a_row = 0
        self._was_ready = False
        self._ready_since = math.inf
        self._asked_to_end = ""
        self._reported_failure = ("", "")
        self._selector = selectors.DefaultSelector()
        self._wakeup = self._listen_for_signals()

    def run(self) -> int:
        """Supervise to the end of the run; the exit code of the process."""
        while True:
            sidecar = self._start()
            problem = self._watch(sidecar)
            code = sidecar.child.poll()
            if code is None:
                if self._asked_to_end:
                    return self._end(sidecar, "asked to end")
                sidecar.stop(self._grace_s)
                code = exit_codes.CRASHED
            log.info("sidecar %d ended: %s", sidecar.pid, problem)
            if code == exit_codes.OK:
                return exit_codes.OK
            if code in exit_codes.FINAL or not self._was_ready:
                return self._fail(*self._explain(sidecar, problem), code)
            backoff_s = self._count_restart()
            if self._restarts_in_a_row > self._max_restarts:
                return self._fail(
                    f"the sidecar ended {self._restarts_in_a_row} times ({problem}); "
                    f"max_restarts is {self._max_restarts}",
                    f"see {sidecar.log}",
                    exit_codes.CRASHED,
                )
            self._save_status(State.RESTARTING, f"{problem}; restart {self._restarts_in_a_row} of {self._max_restarts}")
            if self._pause(backoff_s):
                return self._end_between_two_lives()

    def _start(self) -> SidecarProcess:
        self._reported_failure = ("", "")
        self._ready_since = math.inf
        sidecar = SidecarProcess(self._record, self._run_file, self._command)
        self._reporter.progress(f"sidecar started (process {sidecar.pid}), waiting until it is ready")
        log.info("sidecar %d started", sidecar.pid)
        return sidecar

    def _count_restart(self) -> float:
        """Count a restart; how long to wait before it."""
        if time.monotonic() - self._ready_since >= _HEALTHY_S:
            self._restarts_in_a_row = 0
        self._restarts += 1
        self._restarts_in_a_row += 1
        return float(min(_FIRST_BACKOFF_S * 2 ** (self._restarts_in_a_row - 1), _LONGEST_BACKOFF_S))

    def _watch(self, sidecar: SidecarProcess) -> str:
        """Until the sidecar ends, fails to get ready, or the run shall end; says what happened to the sidecar.

        A successor gets the time to become ready even then: before, it could not take what its predecessor left.
        """
        self._selector.register(sidecar.ready_fd, selectors.EVENT_READ)
        waiting = True
        begin, limit_s = time.monotonic(), self._ready_timeout
        try:
            while True:
                ready_fd = sidecar.ready_fd
                if waiting and self._wait(_OWNER_CHECK_S, ready_fd):
                    answer = sidecar.read_ready()
                    if sidecar.ready_fd < 0:
                        self._selector.unregister(ready_fd)
                        waiting = False
                    if answer is not None:
                        self._take_answer(sidecar, answer)
                elif not waiting:
                    self._wait(_OWNER_CHECK_S)
                code = sidecar.child.poll()
                if code is not None:
                    return f"it ended with {describe_exit(code)}"
                if self._asked_to_end and not (waiting and self._restarts):
                    return "asked to end"
                if self._asked_to_end:
                    limit_s = min(limit_s, self._grace_s)
                if waiting and time.monotonic() - begin > limit_s:
                    return f"it was not ready after {limit_s:.0f} s"
        finally:
            if sidecar.ready_fd >= 0:
                self._selector.unregister(sidecar.ready_fd)
                sidecar.close_pipe()

    def _take_answer(self, sidecar: SidecarProcess, answer: dict[str, str]) -> None:
        if answer["state"] == "ready":
            self._was_ready = True
            self._ready_since = time.monotonic()
            log.info("sidecar %d is ready", sidecar.pid)
            self._reporter.ready(sidecar.pid)
            if self._reporter.abandoned:
                self._asked_to_end = self._asked_to_end or "the command that started the run was gone before READY"
        else:
            # Its exit follows and decides; this is only the better message.
            self._reported_failure = (answer.get("error", ""), answer.get("todo", ""))

    def _explain(self, sidecar: SidecarProcess, problem: str) -> tuple[str, str]:
        error, todo = self._reported_failure
        if error:
            return error, todo
        try:
            status = Status.load(Path(self._record.run_dir))
        except RunError:
            status = None
        if status is not None and status.state is State.FAILED and status.error:
            return status.error, ""
        return f"the sidecar could not go on: {problem}\n{sidecar.log_tail()}", f"see {sidecar.log}"

    def _fail(self, error: str, todo: str, code: int) -> int:
        message = _with_todo(error, todo)
        log.error("%s", message)
        self._save_status(State.FAILED, message)
        self._reporter.failed(error, todo)
        return code if code > 0 else exit_codes.CRASHED

    def _end_between_two_lives(self) -> int:
        """One more sidecar takes what is in the rings and the journal, and saves it."""
        sidecar = self._start()
        return self._end(sidecar, self._watch(sidecar))

    def _end(self, sidecar: SidecarProcess, problem: str) -> int:
        log.info("ending sidecar %d: %s", sidecar.pid, self._asked_to_end)
        ended = sidecar.stop(self._grace_s)
        log.info("sidecar %d %s", sidecar.pid, ended.value)
        code = sidecar.child.returncode
        if code != 0:
            what = f"{problem}; the sidecar was {ended.value} ({describe_exit(code)})"
            self._save_status(State.FAILED, _with_todo(*self._explain(sidecar, what)))
        self._reporter.failed(f"the run was ended before it was ready: {self._asked_to_end}", "start it again")
        return 0

    def _save_status(self, state: State, error: str) -> None:
        run_dir = Path(self._record.run_dir)
        try:
            status = Status.load(run_dir)
        except RunError:
            status = Status(run_id=self._record.run_id, device=self._record.device)
        replace(status, state=state, pid=0, restarts=self._restarts, error=error).save(run_dir)

    def _listen_for_signals(self) -> int:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        # A handler is needed for the wake-up; the death itself is read from the child.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(reading, selectors.EVENT_READ)
        return reading

    def _note_signal(self, number: int, _frame: object) -> None:
        self._asked_to_end = self._asked_to_end or f"asked with {signal.Signals(number).name}"

    def _wait(self, timeout_s: float, descriptor: int = -1) -> bool:
        """Sleep until a signal, the pipe or the time is up; whether `descriptor` is readable."""
        ready = [key.fd for key, _ in self._selector.select(timeout_s)]
        if self._wakeup in ready:
            os.read(self._wakeup, 4096)
        if self._record.owner_lock and not is_held(Path(self._record.owner_lock)):
            self._asked_to_end = self._asked_to_end or "the process that owns the run is gone"
        return descriptor in ready

    def _pause(self, seconds: float) -> bool:
        """Wait before a restart; True when the run shall end instead."""
        end = time.monotonic() + seconds
        while not self._asked_to_end and (left := end - time.monotonic()) > 0:
            self._wait(min(left, _OWNER_CHECK_S))
        return bool(self._asked_to_end)


def _with_todo(error: str, todo: str) -> str:
    return f"{error}\n  What to do: {todo}" if todo else error


def _hold_locks(record: RunRecord, paths: RunPaths, descriptors: Sequence[int]) -> list[HeldLock]:
    if not descriptors:
        return take_run_locks(
            paths,
            run_id=record.run_id,
            config=record.config,
            derived=record.derived_config,
            namespace=record.ray_namespace,
        )
    locks = [HeldLock.adopt(descriptor) for descriptor in descriptors]
    for lock in locks:
        lock.write_note(Holder.me(record.run_id, record.config).note())
    return locks


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the process; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m mps_trainer.launcher.supervisor")
    parser.add_argument("--run-file", type=Path, required=True)
    parser.add_argument("--report-fd", type=int)
    parser.add_argument("--lock-fd", type=int, action="append", default=[])
    parser.add_argument("--grace", type=float, default=GRACE_S)
    parser.add_argument("--sidecar-command", type=json.loads, default=list(SIDECAR_COMMAND))
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if options.report_fd is not None:
        os.set_inheritable(options.report_fd, False)
    reporter = Reporter(options.report_fd)
    paths = RunPaths(options.run_file)
    locks: list[HeldLock] = []
    try:
        record = RunRecord.load(options.run_file)
        locks = _hold_locks(record, paths, options.lock_fd)
        supervisor = Supervisor(
            record, options.run_file, reporter, command=options.sidecar_command, grace_s=options.grace
        )
        return supervisor.run()
    except MpsTrainerError as error:
        log.error("%s", error)
        reporter.failed(error.message, error.todo)
        return exit_codes.BAD_CONFIG
    finally:
        if locks:
            remove_run(paths, record.run_id)
        for lock in locks:
            lock.release()


if __name__ == "__main__":
    sys.exit(main())

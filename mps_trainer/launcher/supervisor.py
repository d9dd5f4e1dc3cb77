"""`python -m mps_trainer.launcher.supervisor`: the small process that keeps one sidecar alive.

    start > READY within ready_timeout > watch --- killed ----------------> RESTARTING (backoff) > start
                                           |------ silent for hang_timeout > stacks, a safe end > RESTARTING
                                           |------ exit 0, STOPPED (idle) -> end
                                           |------ task error, bad config > FAILED > end; the rollout goes on
                                           |------ exit 0 otherwise ------> FAILED > end; it was the task's doing
                                           `------ SIGTERM, owner gone ---> SIGTERM, drain, (SIGSTOP,) SIGKILL > end

An end that is asked for between two lives starts one more sidecar, which takes what is in the rings and the journal.
It holds the run's locks for life: whoever wants to know whether the run lives tests those. When it is killed the
locks drop, and the sidecar ends in order by itself. It imports neither torch nor pyarrow and stays small.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mps_trainer.errors import MpsTrainerError, RunError
from mps_trainer.launcher.autopsy import Autopsy
from mps_trainer.launcher.gpu_share import GpuShare
from mps_trainer.launcher.leftovers import remove_run
from mps_trainer.launcher.process import describe_exit
from mps_trainer.launcher.reports import Reporter
from mps_trainer.launcher.restarts import RestartBudget
from mps_trainer.launcher.run_locks import hold_run_locks
from mps_trainer.launcher.run_status import RunStatus
from mps_trainer.launcher.sidecar_process import SIDECAR_COMMAND, SidecarProcess
from mps_trainer.launcher.watchdog import Watchdog
from mps_trainer.run import HeldLock, RunPaths, RunRecord, State, exit_codes, is_held

log = logging.getLogger("mps_trainer.supervisor")

_OWNER_CHECK_S = 0.5
# An engine measures memory for a minute or two; after this it hangs, and its start is lost anyway.
_ENGINE_START_S = 600.0
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
        share: GpuShare | None = None,
    ) -> None:
        self._record = record
        self._share = share
        self._run_file = run_file
        self._reporter = reporter
        self._command = command
        self._grace_s = grace_s
        self._ready_timeout = float(record.settings["ready_timeout"])
        self._restarts = RestartBudget(int(record.settings["max_restarts"]))
        self._status = RunStatus(record)
        self._autopsy = Autopsy(Path(record.run_dir))
        self._watchdog = Watchdog(Path(record.run_dir), float(record.settings["hang_timeout"]))
        self._asked_to_end = ""
        self._reported_failure = ("", "")
        self._selector = selectors.DefaultSelector()
        self._wakeup = self._listen_for_signals()

    def run(self) -> int:
        """Supervise to the end of the run; the exit code of the process."""
        if self._share is not None and not self._share.is_placed and self._wait_for_engine(self._share):
            return 0
        while True:
            sidecar = self._start()
            problem = self._watch(sidecar)
            code = sidecar.child.poll()
            if code is None:
                if self._asked_to_end:
                    return self._end(sidecar, "asked to end")
                sidecar.stop(self._watchdog.grace_s(self._grace_s))
                code = exit_codes.CRASHED
            if self._share is not None:
                problem += self._share.sidecar_has_ended(sidecar.pid, self._autopsy.doing())
            others_fault = self._share is not None and self._share.others_fault
            problem += self._autopsy.judge(code, hung=self._watchdog.found, others_fault=others_fault)
            log.info("sidecar %d ended: %s", sidecar.pid, problem)
            if code == exit_codes.OK:
                return self._judge_success(sidecar)
            if code in exit_codes.FINAL or not self._restarts.was_ready:
                return self._fail(*self._explain(sidecar, problem), code)
            backoff_s = self._restarts.count()
            count, limit = self._restarts.in_a_row, self._restarts.limit
            if self._restarts.is_spent:
                error = f"the sidecar ended {count} times ({problem}); max_restarts is {limit}"
                return self._fail(error, f"see {sidecar.log}", exit_codes.CRASHED)
            self._save_status(State.RESTARTING, f"{problem}; restart {count} of {limit}", problem)
            if self._pause(backoff_s) or (self._share is not None and self._wait_for_gpu(self._share)):
                return self._end_between_two_lives()

    def _start(self) -> SidecarProcess:
        self._reported_failure = ("", "")
        self._restarts.note_start()
        self._watchdog.found = False
        sidecar = SidecarProcess(self._record, self._run_file, self._command)
        self._reporter.progress(f"sidecar started (process {sidecar.pid}), waiting until it is ready")
        log.info("sidecar %d started", sidecar.pid)
        return sidecar

    def _wait_for_engine(self, share: GpuShare) -> bool:
        """Until the first rollout engine says which GPU it is on; True when the run shall end instead."""
        self._reporter.progress("device: auto: the sidecar takes its place when the first rollout engine starts")
        self._save_status(State.STARTING, "")
        self._reporter.ready(0)
        while not self._asked_to_end and not share.is_placed:
            self._wait(_OWNER_CHECK_S)
        return bool(self._asked_to_end)

    def _wait_for_gpu(self, share: GpuShare, limit_s: float = _ENGINE_START_S) -> bool:
        """Until no engine measures memory and the MPS server takes new clients; True when the run shall end instead."""
        end = time.monotonic() + limit_s
        while not self._asked_to_end and time.monotonic() < end:
            if not share.must_not_change and share.server_is_clean():
                break
            self._wait(_OWNER_CHECK_S)
        return bool(self._asked_to_end)

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
                if self._asked_to_end and not (waiting and self._restarts.total):
                    return "asked to end"
                hold = self._share is not None and self._share.must_not_change
                if not waiting and (hung := self._watchdog.look(sidecar.child, hold=hold)):
                    return hung
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
            self._restarts.note_ready()
            log.info("sidecar %d is ready", sidecar.pid)
            if self._share is not None:
                self._share.sidecar_is_ready()
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
        status = self._status.load()
        if status is not None and status.state is State.FAILED and status.error:
            return status.error, ""
        return f"the sidecar could not go on: {problem}\n{sidecar.log_tail()}", f"see {sidecar.log}"

    def _judge_success(self, sidecar: SidecarProcess) -> int:
        # A task can end the process with code 0 too; only a sidecar that has saved everything writes STOPPED.
        if not self._status.has_stopped:
            todo = f"look for sys.exit() or os._exit() in the task and what it imports; see {sidecar.log}"
            return self._fail("the sidecar ended with exit code 0 without being asked", todo, exit_codes.OK)
        self._reporter.failed("the sidecar was ended before it was ready", "start it again")
        return exit_codes.OK

    def _fail(self, error: str, todo: str, code: int) -> int:
        if self._share is not None:
            self._share.sidecar_is_gone(error, for_good=True)
        message = str(RunError(error, todo))
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
        if code != 0 or not self._status.has_stopped:
            what = f"{problem}; the sidecar was {ended.value} ({describe_exit(code)})"
            self._save_status(State.FAILED, str(RunError(*self._explain(sidecar, what))))
        self._reporter.failed(f"the run was ended before it was ready: {self._asked_to_end}", "start it again")
        return 0

    def _save_status(self, state: State, error: str, last_death: str = "") -> None:
        self._status.save(state, error, restarts=self._restarts.total, last_death=last_death)

    def _listen_for_signals(self) -> int:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        if self._share is not None:
            self._share.wake = lambda: os.write(writing, b"\0")
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
        if self._share is not None:
            self._share.prove_engines()
        return descriptor in ready

    def _pause(self, seconds: float) -> bool:
        """Wait before a restart; True when the run shall end instead."""
        end = time.monotonic() + seconds
        while not self._asked_to_end and (left := end - time.monotonic()) > 0:
            self._wait(min(left, _OWNER_CHECK_S))
        return bool(self._asked_to_end)


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
    share: GpuShare | None = None
    try:
        record = RunRecord.load(options.run_file)
        locks = hold_run_locks(record, paths, options.lock_fd)
        if record.mps == "on":
            share = GpuShare(record.run_id, record.device, record.settings.get("memory"))
            reporter.progress("starting the MPS daemon of this run")
            share.start()
        supervisor = Supervisor(
            record, options.run_file, reporter, command=options.sidecar_command, grace_s=options.grace, share=share
        )
        return supervisor.run()
    except MpsTrainerError as error:
        log.error("%s", error)
        reporter.failed(error.message, error.todo)
        return exit_codes.BAD_CONFIG
    finally:
        if share is not None and not share.close():
            log.info("the MPS daemon stays until its last client has ended")
        if locks:
            remove_run(paths, record.run_id)
        for lock in locks:
            lock.release()


if __name__ == "__main__":
    sys.exit(main())

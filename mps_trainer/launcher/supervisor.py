"""`python -m mps_trainer.launcher.supervisor`: the small process that keeps one sidecar alive.

    start > READY within ready_timeout > watch --- killed ----------------> RESTARTING (backoff) > start
                                           |------ silent for hang_timeout > stacks, a safe end > RESTARTING
                                           |------ exit 0, STOPPED (idle) -> end
                                           |------ task error, bad config > FAILED > end; the rollout goes on
                                           |------ exit 0 otherwise ------> FAILED > end; it was the task's doing
                                           `------ SIGTERM, owner gone ---> SIGTERM, drain, (SIGSTOP,) SIGKILL > end

    [probation of a task of the user's own] > start ...   once, before the first start
    start > imports, task built > WAITING > an engine is placed > "go on" > READY ...     device: auto on a shared GPU

An end that is asked for between two lives starts one more sidecar, which takes what is in the rings and the journal,
unless it would change the GPU's memory under an engine that measures it (`entrance.py`).
A sidecar that dies while it waits is restarted too, and nothing of it has to be taken.
It holds the run's locks for life: whoever wants to know whether the run lives tests those. When it is killed the
locks drop, and the sidecar ends in order by itself. It imports neither torch nor pyarrow and stays small.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mps_trainer.errors import RunError
from mps_trainer.launcher.autopsy import Autopsy
from mps_trainer.launcher.entrance import close_to_engines, wait_to_enter, why_no_last_sidecar
from mps_trainer.launcher.gpu_share import GpuShare
from mps_trainer.launcher.last_words import last_words
from mps_trainer.launcher.leftovers import remove_run
from mps_trainer.launcher.probation import Refusal, hold_probation
from mps_trainer.launcher.process import Ended, describe_exit, held_by_driver
from mps_trainer.launcher.prometheus import serving
from mps_trainer.launcher.reports import Reporter
from mps_trainer.launcher.restarts import RestartBudget
from mps_trainer.launcher.run_locks import hold_run_locks
from mps_trainer.launcher.run_status import RunStatus
from mps_trainer.launcher.sidecar_process import SIDECAR_COMMAND, SidecarProcess
from mps_trainer.launcher.state_watch import StateWatch
from mps_trainer.launcher.supervisor_options import GRACE_S, parse_options
from mps_trainer.launcher.wakeups import Wakeups, listen_early
from mps_trainer.launcher.watchdog import Watchdog
from mps_trainer.run import HeldLock, RunPaths, RunRecord, State, exit_codes

log = logging.getLogger("mps_trainer.supervisor")


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
        place: StateWatch,
    ) -> None:
        self._sidecar: SidecarProcess | None = None
        self._record = record
        self._share = share
        self._run_file = run_file
        self._reporter = reporter
        self._command = command
        self._grace_s = grace_s
        self._ready_timeout = float(record.settings["ready_timeout"])
        self._restarts = RestartBudget(int(record.settings["max_restarts"]))
        self._status = RunStatus(record)
        self._autopsy = Autopsy.of_run(record)
        self._watchdog = Watchdog(Path(record.run_dir), float(record.settings["hang_timeout"]))
        self._reported_failure = ("", "")
        self._wakeups = Wakeups(record.owner_lock, share.look_around if share else lambda: None, place.look)
        if share is not None:
            share.wake = self._wakeups.wake

    def run(self) -> int:
        """Supervise to the end of the run; the exit code of the process."""
        if unfit := self._hold_probation():
            return self._fail(*unfit) if unfit.error else exit_codes.OK
        while True:
            sidecar = self._start()
            problem = self._watch(sidecar)
            code = sidecar.child.poll()
            if code is None:
                if self._wakeups.asked_to_end:
                    return self._end(sidecar, "asked to end")
                close_to_engines(self._share, sidecar, self._wakeups)
                more_s = partial(self._watchdog.more_s, self._grace_s)
                if sidecar.stop_for_a_successor(self._watchdog.grace_s(self._grace_s), more_s) is Ended.STILL_ALIVE:
                    return self._fail(*held_by_driver(sidecar.pid), exit_codes.CRASHED)
                if self._share is not None and (refusal := self._share.refusal) is not None:
                    return self._fail(refusal.message, refusal.todo, exit_codes.BAD_CONFIG)
                code = exit_codes.CRASHED
            sidecar.close()
            if self._share is not None:
                saw_fault = code == exit_codes.GPU_FAULT
                problem += self._share.sidecar_has_ended(sidecar.pid, self._autopsy.doing(), saw_fault=saw_fault)
            hung, only_slow = self._watchdog.found, self._watchdog.was_only_slow
            problem += self._autopsy.judge(code, hung=hung, only_slow=only_slow)
            log.info("sidecar %d ended: %s", sidecar.pid, problem)
            if code == exit_codes.OK:
                return self._judge_success(sidecar)
            once_warm = self._restarts.was_warm and sidecar.is_unplaced
            if code in exit_codes.FINAL or not (self._restarts.was_ready or once_warm):
                return self._fail(*self._explain(sidecar, problem), code)
            backoff_s = self._restarts.count()
            count, limit = self._restarts.in_a_row, self._restarts.limit
            if self._restarts.is_spent:
                error = f"the sidecar ended {count} times ({problem}); max_restarts is {limit}"
                return self._fail(error, f"see {sidecar.log}", exit_codes.CRASHED)
            self._save_status(State.RESTARTING, f"{problem}; restart {count} of {limit}", problem)
            if self._wakeups.pause(backoff_s):
                return self._end_between_two_lives()
            if refused := self._wait_for_gpu(problem):
                return self._fail(*refused) if refused.error else self._end_between_two_lives()

    def _hold_probation(self) -> Refusal | None:
        """Before the first sidecar only: `up` waits for it, an engine or a successor never does."""
        sleep, wakeups = self._wakeups.sleep, self._wakeups
        return hold_probation(self._record, self._run_file, self._reporter, sleep, lambda: wakeups.asked_to_end)

    def _start(self) -> SidecarProcess:
        self._reported_failure = ("", "")
        self._restarts.note_start()
        self._watchdog.found = None
        warm = self._share is not None and not self._share.is_placed
        self._sidecar = sidecar = SidecarProcess(self._record, self._run_file, self._command, warm=warm)
        self._reporter.progress(f"sidecar started (process {sidecar.pid}), waiting until it is ready")
        log.info("sidecar %d started", sidecar.pid)
        return sidecar

    def _wait_for_gpu(self, problem: str) -> Refusal | None:
        waits = f"{problem}; restart {self._restarts.in_a_row} of {self._restarts.limit} waits: "
        return wait_to_enter(
            self._share, self._wakeups, lambda why: self._save_status(State.RESTARTING, waits + why, problem)
        )

    def _watch(self, sidecar: SidecarProcess) -> str:
        """Until the sidecar ends, fails to get ready, or the run shall end; says what happened to the sidecar.

        A successor gets the time to become ready even then: before, it could not take what its predecessor left.
        """
        begin, limit_s = time.monotonic(), self._ready_timeout
        try:
            while True:
                if self._wakeups.sleep(descriptor=sidecar.ready_fd):
                    for answer in sidecar.read_answers():
                        self._take_answer(sidecar, answer)
                code = sidecar.child.poll()
                if code is not None:
                    return f"it ended with {describe_exit(code)}"
                if self._share is not None and self._share.refusal is not None:
                    return self._share.refusal.message
                # It may come while the sidecar is still importing; then it finds the word when it gets there.
                if self._share is not None and self._share.is_placed and sidecar.go():
                    begin = time.monotonic()
                starting = sidecar.ready_fd >= 0 and not sidecar.is_waiting
                hold = self._share is not None and self._share.must_not_change
                # Before READY, and while it waits warm, it says nothing and other limits hold.
                watched = sidecar.ready_fd < 0 and not self._wakeups.asked_to_end
                if watched and (hung := self._watchdog.look(sidecar.child, hold=hold)):
                    return hung
                if self._wakeups.asked_to_end:
                    if not (starting and self._restarts.was_ready):
                        return "asked to end"
                    limit_s = min(limit_s, self._grace_s)
                if starting and time.monotonic() - begin > limit_s:
                    return f"it was not ready after {limit_s:.0f} s"
        finally:
            sidecar.close_pipe()

    def _take_answer(self, sidecar: SidecarProcess, answer: dict[str, str]) -> None:
        if answer["state"] == "failed":
            # Its exit follows and decides; this is only the better message.
            self._reported_failure = (answer.get("error", ""), answer.get("todo", ""))
            return
        if answer["state"] == "waiting":
            self._restarts.note_waiting()
            log.info("sidecar %d is warm and waits for the first rollout engine", sidecar.pid)
        else:
            self._restarts.note_ready()
            log.info("sidecar %d is ready", sidecar.pid)
            # Whoever ends the run has not to wait for an engine that joins now.
            if self._share is not None and not self._wakeups.asked_to_end:
                self._share.sidecar_is_ready(sidecar.pid)
        self._reporter.ready(sidecar.pid)
        if self._reporter.abandoned:
            self._wakeups.ask_to_end("the command that started the run was gone before READY")

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

    def give_up(self, problem: str, todo: str) -> int:
        """After an error of the supervisor itself: nothing of the run goes on without it."""
        try:
            if self._sidecar is not None:
                log.info("sidecar %d %s", self._sidecar.pid, self._sidecar.stop(self._grace_s).value)
        finally:
            code = self._fail(problem, todo, exit_codes.CRASHED)
        return code

    def _end_between_two_lives(self) -> int:
        """One more sidecar takes what is in the rings and the journal, and saves it."""
        if not self._restarts.was_ready:
            # They have only waited for an engine: nothing was sent to them.
            self._save_status(State.STOPPED, "")
            return 0
        if error := why_no_last_sidecar(self._share, self._wakeups):
            self._save_status(State.FAILED, error)
            return 0
        sidecar = self._start()
        return self._end(sidecar, self._watch(sidecar))

    def _end(self, sidecar: SidecarProcess, problem: str) -> int:
        log.info("ending sidecar %d: %s", sidecar.pid, self._wakeups.asked_to_end)
        close_to_engines(self._share, sidecar, self._wakeups)
        ended = sidecar.stop(self._grace_s)
        log.info("sidecar %d %s", sidecar.pid, ended.value)
        if ended is Ended.STILL_ALIVE:
            return self._fail(*held_by_driver(sidecar.pid), exit_codes.CRASHED)
        code = sidecar.child.returncode
        if code == -signal.SIGTERM and not self._restarts.was_ready:
            # Before it could listen to signals; nothing has been learned that it could have saved.
            self._save_status(State.STOPPED, "")
        elif code != 0 or not self._status.has_stopped:
            what = f"{problem}; the sidecar was {ended.value} ({describe_exit(code)})"
            self._save_status(State.FAILED, str(RunError(*self._explain(sidecar, what))))
        self._reporter.failed(f"the run was ended before it was ready: {self._wakeups.asked_to_end}", "start it again")
        return 0

    def _save_status(self, state: State, error: str, last_death: str = "") -> None:
        self._status.save(state, error, restarts=self._restarts.total, last_death=last_death)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the process; see the module's docstring."""
    listen_early()
    options = parse_options(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    reporter = Reporter(options.report_fd)
    paths = RunPaths(options.run_file)
    locks: list[HeldLock] = []
    share: GpuShare | None = None
    supervisor: Supervisor | None = None
    try:
        record = RunRecord.load(options.run_file)
        locks = hold_run_locks(record, paths, options.lock_fd)
        if record.mps == "on":
            share = GpuShare.of_run(record)
            reporter.progress("starting the MPS daemon of this run")
            share.start()
        place = StateWatch(record, paths, locks)
        supervisor = Supervisor(
            record, options.run_file, reporter,
            command=options.sidecar_command, grace_s=options.grace, share=share, place=place,
        )  # fmt: skip
        with serving(record, paths, reporter.progress):
            code = supervisor.run()
        place.tell(RunStatus(record))
        return code
    except Exception as error:  # noqa: BLE001  # a process's top level
        return last_words(error, reporter, supervisor.give_up if supervisor else None)
    finally:
        if share is not None and not share.close():
            log.info("the MPS daemon stays until its last client has ended")
        if locks:
            remove_run(paths, record.run_id)
        for lock in locks:
            lock.release()


if __name__ == "__main__":
    sys.exit(main())

"""The sidecar process from its start to its end: run file, lock, status, learning, loop, exit code.

run file -> lock -> imports, task -> [warm: engine] -> device -> dry step -> checkpoint -> `loop.Sidecar` -> exit code
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from mps_trainer.config import Settings, load_settings
from mps_trainer.errors import (
    AlreadyRunningError,
    ConfigError,
    GpuFaultError,
    MpsTrainerError,
    PlacementError,
    RunError,
    TaskError,
)
from mps_trainer.run import HeldLock, RunPaths, RunRecord, State, Status, try_hold
from mps_trainer.run.exit_codes import BAD_CONFIG, CRASHED, FINAL, OK, TASK_FAILED
from mps_trainer.sidecar.ending import EarlyEnd, Ending, forget_signals
from mps_trainer.sidecar.gpu.faults import end_at_once, is_gpu_fault
from mps_trainer.sidecar.gpu.safe_end import SafeEnd
from mps_trainer.sidecar.loop import Sidecar
from mps_trainer.sidecar.orphan import watch_for_orphaning
from mps_trainer.sidecar.own_files import OwnFiles
from mps_trainer.sidecar.phases import Phases
from mps_trainer.sidecar.ready import ReadyPipe
from mps_trainer.sidecar.startup import build_learning, prepare, settle_device
from mps_trainer.transport import names

_log = logging.getLogger(__name__)


def run(run_file: Path, ready_descriptor: int, go_descriptor: int = -1, begin: float | None = None) -> int:
    """The whole life of a sidecar; its exit code (`run.exit_codes`).

    Args:
        run_file: the run's record.
        ready_descriptor: where to say how the start goes.
        go_descriptor: where a warm one waits before it takes its device; negative: it knows its device.
        begin: `time.monotonic()` at the start of the process.
    """
    phases = Phases(time.monotonic() if begin is None else begin)
    faulthandler.enable()
    # The supervisor asks for the stacks of a sidecar that hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    ready = ReadyPipe(ready_descriptor)
    try:
        record = RunRecord.load(run_file)
        settings = load_settings(record.settings)
    except (RunError, ConfigError) as error:
        _log.error("%s", error)
        ready.failed(error)
        return BAD_CONFIG
    try:
        _serve_run(RunPaths(run_file), record, settings, Start(ready, phases, go_descriptor))
    except Exception as error:  # noqa: BLE001  # the process's top level: every end has an exit code and a reason
        _log.exception("the sidecar failed")
        ready.failed(error)
        return _exit_code(error)
    return OK


@dataclass(frozen=True)
class Start:
    """How this life starts: whom to tell, what it took, and where to wait for a device (negative: nowhere)."""

    ready: ReadyPipe
    phases: Phases
    go_descriptor: int

    @property
    def is_warm(self) -> bool:
        """Whether it waits for an engine; then no life of this run has been READY."""
        return self.go_descriptor >= 0

    def wait(self, ending: Ending, own: OwnFiles) -> bool:
        """Say that we wait, and wait; False when the run ends instead."""
        own.status.state = State.WAITING
        own.save_status()
        _log.info("warm: waiting for the first rollout engine")
        self.ready.waiting()
        going = ending.wait_for_go(self.go_descriptor)
        self.phases.waited()
        own.status.state = State.STARTING if going else State.STOPPED
        own.save_status()
        return going


def _exit_code(error: Exception) -> int:
    if isinstance(error, TaskError):
        return TASK_FAILED
    return BAD_CONFIG if isinstance(error, (ConfigError, PlacementError)) else CRASHED


def _serve_run(paths: RunPaths, record: RunRecord, settings: Settings, start: Start) -> None:
    with ExitStack() as stack:
        lock = try_hold(paths.sidecar_lock, f"sidecar of run {record.run_id}, pid {os.getpid()}")
        if lock is None:
            raise AlreadyRunningError(
                f"another sidecar serves run {record.run_id}", "stop it first: one sidecar serves a run"
            )
        stack.enter_context(lock)
        os.register_at_fork(after_in_child=lambda: _leave_to_parent(lock))
        ending = Ending(paths, settings.idle_timeout, owned=bool(record.owner_lock))
        run_dir = Path(record.run_dir)
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = _begin_status(record, paths)
        own = OwnFiles(status, run_dir, paths.spare_status)
        own.save_status()
        early = EarlyEnd(own, successor=status.restarts > 0 and not start.is_warm)
        watch_for_orphaning(paths.supervisor_lock, own, lambda: early.synchronise())
        try:
            prepared = prepare(record, settings, start.phases)
            if start.is_warm and not start.wait(ending, own):
                _log.info("ending: %s", ending.reason)
            else:
                shared = settle_device(record, settings, start.phases)
                if shared is not None:
                    early.synchronise = stack.enter_context(SafeEnd(shared.device, signals=False)).synchronise
                learning = build_learning(record, settings, prepared, shared, start.phases)
                # The worst case may be large, and its work is done.
                del prepared
                sidecar = Sidecar(record, settings, learning, own, ending)
                stack.callback(sidecar.close)
                start.phases.ready(run_dir)
                _serve(sidecar, start.ready)
        except (MpsTrainerError, RuntimeError, OSError) as error:
            if isinstance(error, GpuFaultError) or is_gpu_fault(error):
                _end_with_dead_gpu(error, own, start.ready)
            # FAILED is for good. After anything else the supervisor starts a successor and says why, in these words.
            status.error = str(error)
            if _exit_code(error) in FINAL:
                status.state = State.FAILED
            own.save_status()
            raise
        if ending.orphaned:
            # Nobody else is left to do it.
            paths.remove(keep_record=names.has_objects(record.run_id))


def _serve(sidecar: Sidecar, ready: ReadyPipe) -> None:
    try:
        sidecar.serve(ready)
    except TaskError:
        # It is not restarted, so what dead operators left is removed now.
        sidecar.close(unlink=True)
        raise


def _end_with_dead_gpu(error: Exception, own: OwnFiles, ready: ReadyPipe) -> NoReturn:
    """For the supervisor, which reads the error, decides on the experiences in work and starts a successor."""
    _log.error("the GPU context is dead, so the sidecar ends at once", exc_info=error)
    own.status.error = str(error)
    own.save_status()
    ready.failed(error)
    end_at_once()


def _leave_to_parent(lock: HeldLock) -> None:
    # A helper that the task forked shares the lock's open file: it would keep a killed sidecar's lock from a successor.
    lock.release()
    forget_signals()


def _begin_status(record: RunRecord, paths: RunPaths) -> Status:
    ours = Status(run_id=record.run_id, pid=os.getpid(), device=record.device)
    if not ((Path(record.run_dir) / "status.json").exists() or paths.spare_status.exists()):
        return ours
    try:
        before = Status.load(Path(record.run_dir), paths.spare_status)
    except RunError as error:
        # Replaced at once: a damaged picture of a predecessor is no reason to have no sidecar.
        _log.warning("%s", error)
        return ours
    # Its counters stand until READY, when the checkpoint and the journal say where we are: people watch them. What only
    # it had measured, or could not write, is not ours.
    return replace(
        before, run_id=ours.run_id, state=ours.state, pid=ours.pid, device=ours.device, error="", trouble="",
        score_age_s=None, score_latency_ms_p50=None, score_latency_ms_p99=None,
    )  # fmt: skip

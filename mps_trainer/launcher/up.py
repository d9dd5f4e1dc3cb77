"""Start a run: plan, run folder, run file, derived config, supervisor, READY.

prepare     read and judge; starts and writes nothing (what `mps-trainer plan` shows)
start_run   write and start; when anything fails, nothing of it is left but the run folder with its logs
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.config import Settings
from mps_trainer.errors import ConfigError, RunError
from mps_trainer.launcher.called_off import CalledOff
from mps_trainer.launcher.derived_config import DerivedConfig, check_is_ours, derive
from mps_trainer.launcher.leftovers import remove_leftovers, remove_run
from mps_trainer.launcher.machine import Machine, read_machine
from mps_trainer.launcher.machine_facts import machine_facts
from mps_trainer.launcher.plan import Plan, make_plan
from mps_trainer.launcher.probation import longest_s
from mps_trainer.launcher.process import Ended, spawn, stop
from mps_trainer.launcher.prometheus import check_prometheus
from mps_trainer.launcher.reports import wait_until_ready
from mps_trainer.launcher.run_folder import link_latest
from mps_trainer.launcher.run_locks import take_run_locks
from mps_trainer.launcher.trinity_config import TrinityConfig, read_trinity_config
from mps_trainer.mps.environment import PIPE_VARIABLE
from mps_trainer.mps.folder import mps_folder
from mps_trainer.run import HeldLock, RunPaths, RunRecord, Status, new_run_id, run_paths
from mps_trainer.run.private_files import write_private

SUPERVISOR_COMMAND = (sys.executable, "-m", "mps_trainer.launcher.supervisor")
# The supervisor reports failures by itself within ready_timeout and the grace of a stop; this is for its silence.
_SILENCE_S = 45.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """A config that can be started here.

    Attributes:
        plan: None when the config has `enabled: false`; then nothing starts.
        settings: with the placement resolved.
    """

    config: TrinityConfig
    settings: Settings
    plan: Plan | None

    def derived(self, run_file: Path) -> DerivedConfig:
        """The derived config for a run file."""
        return derive(
            self.config,
            run_file=run_file,
            one_gpu=self.plan is not None and self.plan.num_gpus == 1,
            utilization=self.plan.utilization if self.plan is not None else None,
        )


@dataclass(frozen=True)
class RunHandle:
    """A run that has reached READY."""

    record: RunRecord
    paths: RunPaths
    plan: Plan
    derived: DerivedConfig
    supervisor: subprocess.Popen[bytes]
    sidecar_pid: int

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.record.run_dir)

    @property
    def ray_environment(self) -> dict[str, str]:
        """What Ray's processes must inherit: with `join: env` the daemon's place, otherwise nothing."""
        if self.plan.utilization is None:
            return {}
        return {PIPE_VARIABLE: str(mps_folder(self.record.run_id).pipe_dir)}

    def status(self) -> Status:
        """What the sidecar says of itself."""
        return Status.load(self.run_dir, self.paths.spare_status)

    def stop(self, grace_s: float = 75.0) -> Ended:
        """End the run from the process that started it, at most `grace_s` before the supervisor is killed."""
        return stop(self.supervisor, grace_s=grace_s)


def prepare(path: Path, machine: Machine | None = None) -> Prepared:
    """Read the user's YAML and plan; raises what the user has to change."""
    config = read_trinity_config(path)
    if not config.settings.enabled:
        return Prepared(config, config.settings, None)
    check_prometheus(config.settings)
    plan = make_plan(config, machine or read_machine())
    return Prepared(config, plan.resolve(config.settings), plan)


def start_run(
    prepared: Prepared,
    *,
    owner_lock: Path | None = None,
    run_id: str | None = None,
    progress: Progress = lambda _: None,
    sidecar_command: Sequence[str] = (),
    grace_s: float | None = None,
) -> RunHandle:
    """Start the supervisor and wait for READY.

    Args:
        owner_lock: a lock that the caller holds; its drop ends the run.
        run_id: for a caller that needed the id before; a new one by default.
        progress: called with a line at each step.
        sidecar_command: what to start instead of the sidecar, for tests.
        grace_s: how long the supervisor lets the sidecar drain when it ends.

    Raises:
        AlreadyRunningError: another run holds this config or this Ray namespace.
        RunError: the sidecar did not get ready; the message is its own.
    """
    if prepared.plan is None:
        raise ConfigError("enabled is false in the operator's args; there is nothing to start", "set enabled: true")
    remove_leftovers()
    run_id = run_id or new_run_id()
    paths = run_paths(run_id)
    record = _make_record(prepared, prepared.plan, run_id, owner_lock)
    derived = prepared.derived(paths.run_file)
    check_is_ours(derived.path)
    with CalledOff(run_id) as called_off:
        supervisor, pid = _start(prepared, record, paths, derived, progress, sidecar_command, grace_s, called_off)
    return RunHandle(record, paths, prepared.plan, derived, supervisor, pid)


def _start(
    prepared: Prepared,
    record: RunRecord,
    paths: RunPaths,
    derived: DerivedConfig,
    progress: Progress,
    sidecar_command: Sequence[str],
    grace_s: float | None,
    called_off: CalledOff,
) -> tuple[subprocess.Popen[bytes], int]:
    supervisor: subprocess.Popen[bytes] | None = None
    reading = -1
    locks = take_run_locks(
        paths, run_id=record.run_id, config=record.config, derived=record.derived_config, namespace=record.ray_namespace
    )
    try:
        try:
            _write_run(prepared, record, paths, derived)
            progress(f"run {record.run_id}, folder {record.run_dir}")
            with called_off.later():
                supervisor, reading = _start_supervisor(record, paths, locks, sidecar_command, grace_s)
        finally:
            # The supervisor has them now; a copy here would keep a dead run alive.
            for lock in locks:
                lock.release()
        limit = prepared.settings.ready_timeout + longest_s(record) + _SILENCE_S
        return supervisor, wait_until_ready(reading, limit, progress, str(Path(record.run_dir) / "supervisor.log"))
    except BaseException:
        if supervisor is not None:
            stop(supervisor, grace_s=_SILENCE_S)
        # What is there may still be that of an earlier run, which names another run file.
        with contextlib.suppress(OSError, ValueError):
            if derived.path.read_text() == derived.text:
                derived.path.unlink()
        remove_run(paths, record.run_id)
        raise
    finally:
        if reading >= 0:
            os.close(reading)


def _make_record(prepared: Prepared, plan: Plan, run_id: str, owner_lock: Path | None) -> RunRecord:
    config = prepared.config
    return RunRecord(
        run_id=run_id,
        config=str(config.path),
        derived_config=str(config.derived_path),
        run_dir=str(config.runs_dir / run_id),
        ray_namespace=config.ray_namespace,
        settings=prepared.settings.dump(),
        device=plan.device,
        mps=plan.mps,
        mps_wish=config.settings.mps,
        owner_lock=str(owner_lock or ""),
    )


def _write_run(prepared: Prepared, record: RunRecord, paths: RunPaths, derived: DerivedConfig) -> None:
    run_dir = Path(record.run_dir)
    try:
        # What is in it, down to whole experiences that are set aside, is for this user alone.
        run_dir.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise RunError(
            f"cannot make the run folder {run_dir}: {error.strerror}",
            "make checkpoint_root_dir writable, or set run_dir in the operator's args",
        ) from None
    try:
        link_latest(run_dir)
        write_private(run_dir / "settings.json", json.dumps(prepared.settings.dump(), indent=2) + "\n")
        write_private(run_dir / "machine.json", json.dumps(machine_facts(), indent=2) + "\n")
        record.save(paths.run_file)
        write_private(run_dir / derived.path.name, derived.text)
        # Last, since it lies beside the user's YAML: what fails before leaves nothing there.
        derived.write()
    except OSError as error:
        raise RunError(
            f"cannot write the files of run {record.run_id}: {error.strerror}",
            f"see that {run_dir} and {paths.run_file.parent} have free space and can be written to",
        ) from None


def _start_supervisor(
    record: RunRecord,
    paths: RunPaths,
    locks: Sequence[HeldLock],
    sidecar_command: Sequence[str],
    grace_s: float | None,
) -> tuple[subprocess.Popen[bytes], int]:
    reading, writing = os.pipe()
    descriptors = [lock.fileno() for lock in locks]
    command = [*SUPERVISOR_COMMAND, "--run-file", str(paths.run_file), "--report-fd", str(writing)]
    for descriptor in descriptors:
        command += ["--lock-fd", str(descriptor)]
    if sidecar_command:
        command += ["--sidecar-command", json.dumps(list(sidecar_command))]
    if grace_s is not None:
        command += ["--grace", str(grace_s)]
    try:
        child = spawn(
            command,
            env=os.environ,
            log=Path(record.run_dir) / "supervisor.log",
            pass_fds=[writing, *descriptors],
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return child, reading

"""`mps-trainer run`: sidecar up, Ray, `trinity run`, everything down, and the truth as exit status.

This process owns all of it: `trinity run` and a private Ray get SIGTERM from the kernel when it dies, and the
supervisor sees the owner lock drop. So nothing stays, whatever kills it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedWriter
from pathlib import Path
from types import MappingProxyType

from mps_trainer.errors import ConfigError, RunError
from mps_trainer.launcher.executables import find_executable
from mps_trainer.launcher.process import spawn, stop
from mps_trainer.launcher.ray_cluster import RayChoice, use_ray
from mps_trainer.launcher.trinity_config import TrinityConfig
from mps_trainer.launcher.up import Prepared, Progress, RunHandle, start_run
from mps_trainer.launcher.verdict import EXIT_INTERRUPTED, LogMark, Verdict, judge
from mps_trainer.run import Status, new_run_id, run_paths, try_hold

log = logging.getLogger(__name__)

# After a signal Trinity needs 4 to 5 s to end; a trainer that saves a checkpoint needs more.
TRINITY_GRACE_S = 60.0
_INTERRUPTED_EARLY = Verdict(EXIT_INTERRUPTED, ("interrupted before trinity run had started",))

Sink = Callable[[bytes], None]


@dataclass(frozen=True)
class TrinityOptions:
    """How to run Trinity.

    Attributes:
        extra_args: for `trinity run`, behind our own `--config`.
        ray: which Ray to use.
        sink: gets what `trinity run` prints.
        progress: gets our own lines.
        sidecar_command: what to start instead of the sidecar, for tests.
    """

    sink: Sink
    progress: Progress
    extra_args: Sequence[str] = ()
    ray: RayChoice = "auto"
    sidecar_command: Sequence[str] = ()


def run_trinity(prepared: Prepared, options: TrinityOptions) -> Verdict:
    """Run Trinity on a config, with the sidecar unless it is disabled; raises what prevents a start."""
    with _signals_interrupt():
        try:
            if prepared.plan is None:
                options.progress("enabled is false: running Trinity with your own file and no sidecar")
                return _run_plain(prepared.config, prepared.config.path, options)
            return _run_with_sidecar(prepared, options)
        except KeyboardInterrupt:
            return _INTERRUPTED_EARLY


def run_without_sidecar(config: TrinityConfig, yaml: Path, options: TrinityOptions) -> Verdict:
    """Run Trinity on `yaml`, which was made from `config`; no run of ours is started."""
    with _signals_interrupt():
        try:
            return _run_plain(config, yaml, options)
        except KeyboardInterrupt:
            return _INTERRUPTED_EARLY


def _run_plain(config: TrinityConfig, yaml: Path, options: TrinityOptions) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="mpst-log-") as folder, _ray(config, options, Path(folder)) as environment:
        return _trinity(config, yaml, Path(folder), environment, options).judge(config, None, None)


def _run_with_sidecar(prepared: Prepared, options: TrinityOptions) -> Verdict:
    _require_own_ray(prepared, options)
    run_id = new_run_id()
    paths = run_paths(run_id)
    with contextlib.ExitStack() as stack:
        owner = try_hold(paths.owner_lock)
        if owner is None:
            raise RunError(f"cannot hold {paths.owner_lock}", "start again")
        stack.enter_context(owner)
        stack.callback(paths.owner_lock.unlink, missing_ok=True)
        run = start_run(
            prepared,
            owner_lock=paths.owner_lock,
            run_id=run_id,
            progress=options.progress,
            sidecar_command=options.sidecar_command,
        )
        stack.callback(run.stop)
        with _ray(prepared.config, options, run.run_dir, run.ray_environment) as environment:
            outcome = _trinity(prepared.config, run.derived.path, run.run_dir, environment, options)
        supervisor_code = run.supervisor.poll()
        # A status that the run folder refuses is gone with the run.
        before = _last_status(run)
        options.progress("stopping the sidecar: it takes what is left and saves a checkpoint")
        run.stop()
        verdict = outcome.judge(prepared.config, _newer(before, _last_status(run)), supervisor_code)
        return replace(verdict, notes=(*verdict.notes, f"what it learnt: mps-trainer report {run.run_dir}"))


def _require_own_ray(prepared: Prepared, options: TrinityOptions) -> None:
    assert prepared.plan is not None
    if prepared.plan.utilization is not None and (options.ray == "existing" or prepared.config.ray_address != "auto"):
        raise ConfigError(
            "join: env needs a Ray that starts after the run's MPS daemon, with its place in the environment",
            "use --ray private and no cluster.ray_address; or `mps-trainer up`, then the export that it prints, then "
            "`ray start`",
        )


@contextlib.contextmanager
def _ray(
    config: TrinityConfig, options: TrinityOptions, logs: Path, inherited: Mapping[str, str] = MappingProxyType({})
) -> Iterator[dict[str, str]]:
    # A Ray that runs already cannot have been started with what this run has only made now.
    choice = "private" if inherited else options.ray
    with use_ray(choice, config.ray_address, options.progress, logs, inherited) as ray:
        options.progress(f"Ray: {ray.description}")
        yield {**os.environ, **ray.environment}


@dataclass(frozen=True)
class _Outcome:
    return_code: int
    interrupted: bool
    console: Path
    mark: LogMark

    def judge(self, config: TrinityConfig, status: Status | None, supervisor_code: int | None) -> Verdict:
        return judge(
            config,
            return_code=self.return_code,
            interrupted=self.interrupted,
            console=self.console,
            mark=self.mark,
            status=status,
            supervisor_code=supervisor_code,
        )


def _trinity(
    config: TrinityConfig, yaml: Path, logs: Path, environment: dict[str, str], options: TrinityOptions
) -> _Outcome:
    console = logs / "trinity.log"
    mark = LogMark.now(config)
    command = [find_executable("trinity"), "run", "--config", str(yaml), *options.extra_args]
    options.progress(" ".join(command))
    try:
        file = console.open("ab")
    except OSError as error:
        raise RunError(f"cannot write {console}: {error.strerror}", "make room there, or set run_dir") from None
    child = spawn(command, env=environment, log=subprocess.PIPE, dies_with_us=True)
    pump = threading.Thread(target=_pump, args=(child, file, options.sink), daemon=True)
    pump.start()
    interrupted = False
    try:
        child.wait()
    except KeyboardInterrupt as interrupt:
        interrupted = True
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        options.progress(f"{signal.Signals(number).name}: passed on to trinity run, waiting for its end")
        child.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(TRINITY_GRACE_S)
    finally:
        stop(child, grace_s=TRINITY_GRACE_S)
    # Its actors may hold the pipe for a moment longer; what they still print is in Trinity's own logs.
    pump.join(timeout=5)
    return _Outcome(child.returncode, interrupted, console, mark)


def _pump(child: subprocess.Popen[bytes], file: BufferedWriter, sink: Sink) -> None:
    """Read to the end whatever becomes of the targets: a full pipe would block `trinity run` for ever."""
    assert child.stdout is not None

    def write_to_file(chunk: bytes) -> None:
        file.write(chunk)
        file.flush()

    targets = [write_to_file, sink]
    while chunk := os.read(child.stdout.fileno(), 65536):
        for target in list(targets):
            try:
                target(chunk)
            except OSError as error:  # noqa: PERF203  # the disk is full, or the reader of our output is gone
                log.warning("the output of trinity run has one target less: %s", error)
                targets.remove(target)
    # What could not be written is still in the buffer, and would be tried again.
    with contextlib.suppress(OSError):
        file.close()


def _newer(before: Status | None, after: Status | None) -> Status | None:
    if before is None or after is None:
        return after or before
    return after if after.updated >= before.updated else before


def _last_status(run: RunHandle) -> Status | None:
    try:
        return run.status()
    except RunError:
        return None


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """The first SIGINT or SIGTERM becomes a KeyboardInterrupt; later ones must not disturb the clean-up."""

    def first(number: int, _frame: object) -> None:
        for later in (signal.SIGINT, signal.SIGTERM):
            signal.signal(later, lambda *_: None)
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

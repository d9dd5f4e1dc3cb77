"""Probation of a user's task, before READY: a short process outside MPS, which is gone before anything is reserved.

    wanted? > where? > process, bounded > its end, and NVML agrees > passed: the sidecar starts
                                                                   `- failed: the run fails as by a task error

`device: auto` on several GPUs has no GPU yet: an engine will name it, and must not wait for this. Then it takes an idle
GPU with room, or the CPU, and says which.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mps_trainer.config import format_size
from mps_trainer.errors import PlacementError
from mps_trainer.launcher.gpu_share import DEFAULT_POOL
from mps_trainer.launcher.process import KILL_SECONDS, describe_exit, held_by_driver, spawn, wait_for_exit
from mps_trainer.launcher.reports import Reporter
from mps_trainer.launcher.sidecar_process import sidecar_environment
from mps_trainer.mps.environment import without_mps
from mps_trainer.mps.nvml import GpuFacts, NvmlFacts, read_nvml
from mps_trainer.run import RunRecord, exit_codes
from mps_trainer.run.private_files import write_private

log = logging.getLogger("mps_trainer.supervisor")

COMMAND = (sys.executable, "-m", "mps_trainer.sidecar.probation")
# A CUDA context and what libraries take outside of PyTorch's pool.
_CONTEXT = 2**30
_LOOK_S = 0.5
# A killed process keeps its memory on the GPU for a moment.
_GONE_S = 10.0
_STACK_S = 2.0
_LOG_LINES = 12


class Refusal(NamedTuple):
    """Why no sidecar shall start; no error when the run was asked to end."""

    error: str
    todo: str
    code: int


def is_wanted(record: RunRecord) -> bool:
    """Whether this run's task has to pass probation; `auto`: a task of the user's own, on a GPU."""
    wish, is_users = record.settings.get("probation", "auto"), ":" in record.settings["task"]
    return wish == "on" or (wish == "auto" and is_users and record.device != "cpu")


def longest_s(record: RunRecord) -> float:
    """How much later READY may be because of probation."""
    return float(record.settings["probation_timeout"]) + _GONE_S if is_wanted(record) else 0.0


@dataclass(frozen=True)
class Place:
    """Where it happens: a GPU, or the CPU for None; and why there."""

    gpu: GpuFacts | None
    why: str


def choose_place(record: RunRecord, facts: NvmlFacts) -> Place:
    """The run's own device, or, while that is not known, an idle GPU with room or the CPU."""
    if record.device == "cpu":
        return Place(None, "on the CPU")
    if record.device != "cuda":
        index = int(record.device.removeprefix("cuda:"))
        found = next((gpu for gpu in facts.gpus if gpu.index == index), None)
        if found is None:
            raise PlacementError(
                f"there is no {record.device}: NVML sees {len(facts.gpus)} GPUs", "name a GPU that is there"
            )
        return Place(found, f"on {record.device}")
    need = (record.settings.get("memory") or DEFAULT_POOL) + _CONTEXT
    # Not where somebody works: memory that comes and goes disturbs an engine that measures it.
    idle = [gpu for gpu in facts.gpus if not gpu.processes and not gpu.mig and gpu.total - gpu.used >= need]
    if not idle:
        return Place(
            None, f"on the CPU, since no idle GPU has {format_size(need)} free and no engine has named one yet"
        )
    best = max(idle, key=lambda gpu: (gpu.total - gpu.used, gpu.index))
    return Place(best, f"on cuda:{best.index}, which is idle; no engine has named a GPU yet")


def probation_environment(record: RunRecord, place: Place, inherited: Mapping[str, str]) -> dict[str, str]:
    """Few threads, no MPS whatever the shell says, one GPU or none, and every launch waited for."""
    env = without_mps(sidecar_environment(record, inherited))
    env["CUDA_VISIBLE_DEVICES"] = place.gpu.uuid if place.gpu else ""
    # So that a traceback shows the line whose kernel failed.
    env["CUDA_LAUNCH_BLOCKING"] = "1"
    return env


class Probation:
    """One probation.

    Args:
        sleep: sleeps that many seconds at most, and says whether the descriptor, if one is given, is readable.
        is_asked: whether the run shall end.
    """

    def __init__(
        self,
        record: RunRecord,
        run_file: Path,
        place: Place,
        sleep: Callable[..., bool],
        is_asked: Callable[[], object],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.log = Path(record.run_dir) / "probation.log"
        self.last = "starting"
        self.answer: dict[str, Any] = {}
        self._record = record
        self._sleep = sleep
        self._is_asked = is_asked
        self._is_substitute = place.gpu is None and record.device != "cpu"
        self._limit_s = float(record.settings["probation_timeout"])
        self._buffer = b""
        self._open = True
        self.reading, writing = os.pipe()
        device = "cuda:0" if place.gpu else "cpu"
        try:
            self.child: subprocess.Popen[bytes] = spawn(
                [*command, "--run-file", str(run_file), "--report-fd", str(writing), "--device", device],
                env=probation_environment(record, place, os.environ),
                log=self.log,
                pass_fds=[writing],
                dies_with_us=True,
            )
        finally:
            os.close(writing)

    def see_through(self) -> Refusal | None:
        """Until it has ended, at most for its time; why the run must not go on, if so."""
        deadline = time.monotonic() + self._limit_s
        try:
            while not (ended := self._has_ended()) and not self._is_asked() and time.monotonic() < deadline:
                self._listen(_LOOK_S)
            if not ended and not self._is_asked():
                self._ask_for_its_stack()
            # With everything that the task has started; outside of MPS no kill harms anybody.
            os.killpg(self.child.pid, signal.SIGKILL)
            code = wait_for_exit(self.child, KILL_SECONDS)
            # What it said last may lie in the pipe still.
            while self._open and select.select([self.reading], [], [], 0)[0]:
                self._open = self._read()
        finally:
            os.close(self.reading)
        if code is None:
            return Refusal(*held_by_driver(self.child.pid), exit_codes.CRASHED)
        return None if self._is_asked() else self._judge(code, ended)

    def _has_ended(self) -> bool:
        # It stays a zombie, so that its PID and its process group are surely still its own.
        return os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _listen(self, timeout_s: float) -> None:
        if not self._open:
            self._sleep(timeout_s)
        elif self._sleep(timeout_s, self.reading):
            self._open = self._read()

    def _ask_for_its_stack(self) -> None:
        """It writes where it is to its log, and ends."""
        os.kill(self.child.pid, signal.SIGUSR1)
        end = time.monotonic() + _STACK_S
        while not self._has_ended() and (left := end - time.monotonic()) > 0:
            self._listen(left)

    def _read(self) -> bool:
        chunk = os.read(self.reading, 65536)
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            self.last = event.get("at", self.last)
            if "at" not in event:
                self.answer = event
        return bool(chunk)

    def _judge(self, code: int, ended: bool) -> Refusal | None:
        if "passed" in self.answer:
            return None
        name = self._record.settings["task"]
        if "failed" in self.answer:
            final = code if code in exit_codes.FINAL and code else exit_codes.TASK_FAILED
            return Refusal(f"probation of the task: {self.answer['failed']}", self.answer["todo"], final)
        tail = f"({self.last})\n{self._log_tail()}"
        if not ended and self._is_substitute:
            # What takes long on the CPU may be fast on the GPU that the run will have.
            return None
        if not ended:
            return Refusal(
                f"probation of task {name} was not over after {self._limit_s:g} s {tail}",
                f"the task hangs or is too slow; the stack is in {self.log}. Raise probation_timeout, or set "
                "probation: off if you know better",
                exit_codes.TASK_FAILED,
            )
        todo = f"the task, or a library that it calls, broke its process; see {self.log}"
        if code == exit_codes.OK:
            todo = f"look for os._exit() in the task and what it imports; see {self.log}"
        if code == -signal.SIGKILL:
            todo = f"was it out of memory (`dmesg`)? Lower batch_size or the columns' maxima; see {self.log}"
        return Refusal(
            f"probation of task {name} crashed with {describe_exit(code)} {tail}", todo, exit_codes.TASK_FAILED
        )

    def _log_tail(self) -> str:
        with self.log.open(errors="replace") as file:
            return "".join(deque(file, _LOG_LINES)).strip()


def hold_probation(
    record: RunRecord,
    run_file: Path,
    reporter: Reporter,
    sleep: Callable[..., bool],
    asked: Callable[[], str],
) -> Refusal | None:
    """Hold it if this run wants it; None when the sidecar may start. `asked`: why the run shall end, or ""."""
    if not is_wanted(record):
        return None
    try:
        place = choose_place(record, read_nvml())
        task, limit_s = record.settings["task"], record.settings["probation_timeout"]
        reporter.progress(f"probation of {task} {place.why}, outside MPS, at most {limit_s:g} s")
        log.info("probation of %s %s", task, place.why)
        probation = Probation(record, run_file, place, sleep, asked)
        refusal = probation.see_through()
        _wait_until_gone(place, probation.child.pid, sleep)
    except PlacementError as error:
        return Refusal(error.message, error.todo, exit_codes.BAD_CONFIG)
    if asked():
        reporter.failed(f"the run was ended before it was ready: {asked()}", "start it again")
        return Refusal("", "", exit_codes.OK)
    report = probation.answer.get("passed")
    if refusal is None:
        for line in (
            _lines(report) if report else [f"probation was not over after {limit_s:g} s; the CPU is no measure"]
        ):
            reporter.progress(line)
            log.info("%s", line)
    outcome = {"task": task, "where": place.why, **probation.answer}
    try:
        write_private(Path(record.run_dir) / "probation.json", json.dumps(outcome, indent=1) + "\n")
    except OSError as error:
        log.warning("cannot write probation.json: %s", error.strerror)
    return refusal


def _lines(report: Mapping[str, Any]) -> list[str]:
    found = (
        f"probation passed: {report['steps']} steps of {report['step_ms']:.1f} ms, longest "
        f"{report['longest_step_ms']:.1f} ms, peak memory {format_size(report['peak'])}"
    )
    if report["longest_kernel"]:
        found += f", longest kernel {report['longest_kernel_ms']:.2f} ms ({report['longest_kernel'][:60]})"
    return [found, *(f"probation warns: {warning}" for warning in report["warnings"])]


def _wait_until_gone(place: Place, pid: int, sleep: Callable[..., bool]) -> None:
    """Until NVML no longer shows the process on its GPU. Its memory may be freed a moment after its end."""
    if place.gpu is None:
        return
    deadline = time.monotonic() + _GONE_S
    while any(p.pid == pid for gpu in read_nvml().gpus if gpu.uuid == place.gpu.uuid for p in gpu.processes):
        if time.monotonic() > deadline:
            raise PlacementError(
                f"the process of probation ({pid}) has ended, and NVML still shows it on {place.gpu.uuid}",
                "see `nvidia-smi` and `dmesg`; a GPU in this state may need a reset",
            )
        sleep(0.1)

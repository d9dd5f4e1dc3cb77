"""A real run for the GPU scripts: a Trinity config, launcher, supervisor, sidecar, and an operator's channel.

Only Trinity is missing: a thread feeds made-up experiences through the channel that the operator would use.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gpu_lab import ONLY_GPU, SCRIPTS, lab_gpus
from gpu_task import COMMAND_VARIABLE, MEMORY_VARIABLE, WIDTH, DrillTask

from mps_trainer.columns import Column
from mps_trainer.config import Settings
from mps_trainer.errors import MpsTrainerError, RunError, TransportError
from mps_trainer.launcher.leftovers import find_leftovers
from mps_trainer.launcher.neighbours import SERVER_NAME
from mps_trainer.launcher.process_titles import command_line
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import all_mps_folders, mps_folder
from mps_trainer.run import RunRecord, State, Status, is_held, run_paths
from mps_trainer.run.process import is_descendant
from mps_trainer.tasks import wire_columns
from mps_trainer.transport import OperatorChannel, RingSettings
from mps_trainer.transport.sweep import remove_run

CONFIG = """\
mode: explore
project: gpu_lab
name: {name}
checkpoint_root_dir: {work}/checkpoints
model: {{model_path: {work}/none}}
buffer: {{batch_size: 64, total_steps: 100000}}
data_processor:
  experience_pipeline:
    operators:
      - name: mps_trainer.operator.AuxTrainer
        args:
          task: gpu_task:DrillTask
          device: cuda:{gpu}
          mps: on
          memory: {memory}
          steps_per_batch: 16
          replay_capacity: 2048
          checkpoint_every: 1600
          max_restarts: 20
          ready_timeout: 60s
          idle_timeout: 60s
"""
# Where the version has them: no trial of the task before READY, which is no matter of these scripts; a soon watchdog.
OPTIONAL = {"probation": "off", "hang_timeout": "10s", "pace": "off"}


def prepare_environment(work: Path) -> Path:
    """State folder, PYTHONPATH and the task's files in os.environ; the file that commands the task."""
    os.environ["MPS_TRAINER_STATE_DIR"] = f"{work}/s"
    paths = [str(SCRIPTS), str(SCRIPTS.parent), *filter(None, sys.path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ[COMMAND_VARIABLE], os.environ[MEMORY_VARIABLE] = f"{work}/command", f"{work}/memory"
    return work / "command"


def write_config(work: Path, name: str, memory: str) -> Path:
    path = work / f"{name}.yaml"
    text = CONFIG.format(work=work, name=name, memory=memory, gpu=ONLY_GPU or "0")
    text += "".join(f"          {key}: {word}\n" for key, word in OPTIONAL.items() if key in Settings.model_fields)
    path.write_text(text)
    return path


def wait_for(condition: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.02)


def drill_rows(rng: np.random.Generator) -> Callable[[], dict[str, Any]]:
    """64 experiences of the drill's task at a time."""
    features = rng.standard_normal((64, WIDTH)).astype(np.float32)
    return lambda: {"group": ["g"] * 64, "reward": rng.random(64, np.float32), "features": features}


class Feeding(threading.Thread):
    """Feeds a run without a pause, so that its sidecar trains all the time; `paused` lets it idle.

    `make` gives the columns but `eid` of a batch, of `columns`; by default those of the drill's task.
    """

    def __init__(
        self, run_id: str, columns: Sequence[Column] | None = None, make: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.paused = threading.Event()
        self.error = ""
        self.sent = 0
        self._run_id = run_id
        self._done = threading.Event()
        self._make = make or drill_rows(np.random.default_rng(0))
        settings = RingSettings(num_slots=4, slot_bytes=2**20)
        columns = columns or wire_columns(DrillTask())
        self._channel = OperatorChannel.create(run_id, columns, settings, backpressure="drop_newest")
        self.start()

    @property
    def backlog(self) -> int:
        return self._channel.backlog()

    def run(self) -> None:
        # At most two batches wait, so that a pause shows soon.
        while not self._done.wait(0.002):
            if self.paused.is_set() or self._channel.backlog() >= 2:
                continue
            self.sent += 1
            rows = self._make()
            eids = [f"{self._run_id}-{self.sent}-{i}" for i in range(len(rows["reward"]))]
            try:
                self._channel.send({"eid": eids, **rows}, request_id=self.sent, want_scores=False)
            except TransportError as error:
                # The run has ended and has taken the segment along.
                self.error = str(error)
                return

    def close(self) -> None:
        self._done.set()
        self.join(10)
        with contextlib.suppress(TransportError):
            self._channel.close()
        if not is_held(run_paths(self._run_id).supervisor_lock):
            remove_run(self._run_id)


def status_of(run_dir: str | Path) -> Status | None:
    try:
        return Status.load(Path(run_dir))
    except RunError:
        return None


def trains(record: RunRecord) -> Any:
    """A condition: the sidecar of the run is READY and takes steps."""
    first: list[tuple[int, int]] = []

    def check() -> bool:
        status = status_of(record.run_dir)
        if status is None or status.state is not State.READY or not status.pid:
            return False
        # Of the same life: a successor may start from an older checkpoint.
        if not first or first[0][0] != status.pid:
            first[:] = [(status.pid, status.version)]
        return status.version > first[0][1]

    return check


def membership(run_id: str, sidecar: int, engine: int) -> dict[str, Any]:
    """Who is a client of the run's daemon, by PID, and who holds how many bytes, by NVML."""
    clients = [client.pid for client in MpsDaemon(mps_folder(run_id)).clients()]
    used = {p.pid: p.used for gpu in lab_gpus() for p in gpu.processes}
    return {
        "clients": clients,
        "sidecar is a client": sidecar in clients,
        "engine is a client": any(is_descendant(client, engine) for client in clients),
        "NVML bytes by process": used,
    }


def _computing() -> list[int]:
    found = [p.pid for gpu in lab_gpus() for p in gpu.processes]
    return found if not ONLY_GPU else [pid for pid in found if not command_line(pid).startswith(SERVER_NAME)]


def what_is_left() -> dict[str, list[Any]]:
    """Of this state folder, on the GPU and in /dev/shm; all empty when nothing is."""
    try:
        files = [str(item.path) for item in find_leftovers()]
    except MpsTrainerError as error:
        files = [str(error)]
    # NVML shows a process for a moment after its end. The MPS server of a run on another GPU stands here too.
    deadline = time.monotonic() + 5
    while (pids := _computing()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return {
        "mps folders": [run_id for run_id, _ in all_mps_folders()],
        "files and shared memory": files,
        "on the GPU": pids,
    }

"""The runs of `gpu_drill_vllm.py`, one after the other under one run id and one MPS daemon, and what feeds them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from gpu_drill_supervisor import KEEP
from gpu_jobs import kill_drained
from gpu_lab import SCRIPTS
from gpu_real_run import Feeding, prepare_environment, status_of, trains, wait_for, write_config

from mps_trainer.launcher import up
from mps_trainer.mps.folder import mps_folder
from mps_trainer.run import State, is_held, new_run_id, run_paths
from mps_trainer.run.process import ProcessIdentity

# Of the supervisor; the short one is for a hang, which is killed after it.
GRACE_S, HANG_GRACE_S = 20.0, 3.0
START_S = 60.0
GUARDIAN = """\
import pathlib, signal, sys
from mps_trainer.run import try_hold
lock = try_hold(pathlib.Path(sys.argv[1]))
print(lock is not None, flush=True)
signal.pause()
"""


class Session:
    """The runs of the drill, one after the other under one run id, and what feeds them."""

    def __init__(self, work: Path, memory: str) -> None:
        self.command = prepare_environment(work)
        self.run_id = new_run_id()
        self.folder = mps_folder(self.run_id)
        self.run: up.RunHandle | None = None
        self.start_seconds: list[float] = []
        self.owner: subprocess.Popen[str] | None = None
        self._work, self._memory = work, memory
        self._feeding: Feeding | None = None
        up.SUPERVISOR_COMMAND = (sys.executable, str(SCRIPTS / "gpu_drill_supervisor.py"))  # type: ignore[assignment]

    @property
    def is_over(self) -> bool:
        """Neither supervisor nor sidecar lives."""
        paths = run_paths(self.run_id)
        return not is_held(paths.supervisor_lock) and not is_held(paths.sidecar_lock)

    def ensure(self, way: str = "") -> up.RunHandle:
        """A run whose sidecar is READY and trains; a new one where there is none, or where the way needs its own."""
        owned = way == "driver-killed"
        if self.run is not None and (self.is_over or owned or way == "hang-down"):
            self.end()
        if self.run is None:
            self.command.unlink(missing_ok=True)
            lock = self._start_owner() if owned else None
            started = time.monotonic()
            grace_s = HANG_GRACE_S if way == "hang-down" else GRACE_S
            config = write_config(self._work, f"r{len(self.start_seconds)}", self._memory)
            self.run = up.start_run(up.prepare(config), run_id=self.run_id, owner_lock=lock, grace_s=grace_s)
            self.start_seconds.append(time.monotonic() - started)
            (self.folder.path / KEEP).touch()
        if self._feeding is None or not self._feeding.is_alive():
            self._stop_feeding()
            self._feeding = Feeding(self.run_id)
        wait_for(trains(self.run.record), START_S, f"the sidecar trains ({self.run.run_dir})")
        return self.run

    def sidecar(self) -> ProcessIdentity:
        assert self.run is not None
        status = status_of(self.run.run_dir)
        found = ProcessIdentity.of(status.pid) if status else None
        if found is None:
            raise RuntimeError(f"no sidecar: {status}")
        return found

    def settle(self, dead: ProcessIdentity) -> str:
        """After the sidecar's end: until the run is over or has another sidecar; says which."""
        run = self.run
        assert run is not None

        def settled() -> bool:
            status = status_of(run.run_dir)
            again = status is not None and status.state is State.READY and status.pid not in (0, dead.pid)
            return again or self.is_over

        wait_for(settled, START_S, "run over, or sidecar restarted")
        status = status_of(run.run_dir)
        assert status is not None
        if not self.is_over:
            return f"restarted ({status.restarts})"
        return f"run over, {status.state.value}: {' '.join(status.error.split())[:160]}".removesuffix(": ")

    def end(self) -> None:
        """End the run, whatever its state, and reap what this script started."""
        self._stop_feeding()
        if self.run is not None:
            self.run.stop(grace_s=20)
            sidecar = status_of(self.run.run_dir)
            identity = ProcessIdentity.of(sidecar.pid) if sidecar and sidecar.pid else None
            # The lock proves that a sidecar of this run lives, whoever has its old PID.
            if identity is not None and is_held(run_paths(self.run_id).sidecar_lock) and not identity.wait(15):
                kill_drained(identity)
            self.run = None
        if self.owner is not None:
            self.owner.kill()
            self.owner.wait()
            self.owner = None

    def _start_owner(self) -> Path:
        path = run_paths(self.run_id).owner_lock
        self.owner = subprocess.Popen(
            [sys.executable, "-c", GUARDIAN, str(path)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        assert self.owner.stdout is not None
        if self.owner.stdout.readline().strip() != "True":
            raise RuntimeError("the stand-in of the driver got no lock")
        return path

    def _stop_feeding(self) -> None:
        if self._feeding is not None:
            self._feeding.close()
            self._feeding = None

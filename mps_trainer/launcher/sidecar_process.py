"""One life of a sidecar: its command, its environment, its READY line and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from mps_trainer.launcher.process import GPU_DRAIN_SECONDS, Ended, spawn, stop
from mps_trainer.run import RunRecord

SIDECAR_COMMAND = (sys.executable, "-m", "mps_trainer.sidecar")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_NICE_ON_CPU = 5
_OOM_SCORE = 500


def sidecar_environment(record: RunRecord, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the sidecar: few threads, and the GPU of the plan or none."""
    threads = str(record.settings.get("cpu_threads", 1))
    env = {**inherited, **dict.fromkeys(_THREAD_VARIABLES, threads), "PYTHONUNBUFFERED": "1"}
    if record.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif record.mps == "on":
        # The sidecar sets what it needs by itself, once it is known which GPU it goes to.
        env.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        # cuda:<n> counts as NVML does, over all GPUs, whatever this shell happens to hide.
        env.pop("CUDA_VISIBLE_DEVICES", None)
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return env


class SidecarProcess:
    """A running sidecar. `ready_fd` becomes readable with its first line, or with its end."""

    def __init__(self, record: RunRecord, run_file: Path, command: Sequence[str] = SIDECAR_COMMAND) -> None:
        self._record = record
        self.log = Path(record.run_dir) / "sidecar.log"
        self.ready_fd, child_end = os.pipe()
        try:
            self.child: subprocess.Popen[bytes] = spawn(
                [*command, "--run-file", str(run_file), "--ready-fd", str(child_end)],
                env=sidecar_environment(record, os.environ),
                log=self.log,
                pass_fds=[child_end],
            )
        finally:
            os.close(child_end)
        self._buffer = b""
        self._yield_to_the_rollout()

    @property
    def pid(self) -> int:
        """The PID of this life."""
        return self.child.pid

    def read_ready(self) -> dict[str, str] | None:
        """Call when `ready_fd` is readable: its JSON line when that is complete; closes the pipe after it."""
        chunk = os.read(self.ready_fd, 65536)
        self._buffer += chunk
        line, newline, _ = self._buffer.partition(b"\n")
        if chunk and not newline:
            return None
        self.close_pipe()
        if not newline:
            return None
        answer: dict[str, str] = json.loads(line)
        return answer

    def close_pipe(self) -> None:
        """Stop listening for READY."""
        if self.ready_fd >= 0:
            os.close(self.ready_fd)
            self.ready_fd = -1

    def stop(self, grace_s: float) -> Ended:
        """End it: SIGTERM, time to drain and save, then the harder ways."""
        return stop(self.child, grace_s=grace_s, gpu_drain_s=0.0 if self._record.device == "cpu" else GPU_DRAIN_SECONDS)

    def log_tail(self, num_lines: int = 12) -> str:
        """The last lines of its log, for a message."""
        with self.log.open(errors="replace") as file:
            return "".join(deque(file, num_lines)).strip()

    def _yield_to_the_rollout(self) -> None:
        try:
            # When memory runs out, the kernel should take the sidecar and not the rollout. A client of MPS that dies
            # with work in flight may take the rollout along, so there the kernel should find somebody else.
            if self._record.mps != "on":
                Path(f"/proc/{self.pid}/oom_score_adj").write_text(str(_OOM_SCORE))
            if self._record.device == "cpu":
                os.setpriority(os.PRIO_PROCESS, self.pid, _NICE_ON_CPU)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # Already gone, or a container that forbids it; neither is a reason to have no sidecar.
            return

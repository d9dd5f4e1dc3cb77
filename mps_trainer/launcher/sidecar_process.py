"""One life of a sidecar: its command, its environment, what it says before READY, the word to go on, its end."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mps_trainer.errors import RunError
from mps_trainer.launcher.process import GPU_DRAIN_SECONDS, Ended, spawn, stop
from mps_trainer.run import RunPaths, RunRecord

log = logging.getLogger("mps_trainer.supervisor")

SIDECAR_COMMAND = (sys.executable, "-m", "mps_trainer.sidecar")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_NICE_ON_CPU = 5
# When memory runs out, the kernel should rather take the sidecar than the rollout, whose workers have 1000 from Ray.
_OOM_SCORES = (1000,)
# A client of MPS that is killed amid a kernel may take the engine along, so there the kernel should find somebody else
# first: a tenth of the memory is overlooked, or at least what we inherited (of a shell inside Ray, 1000) is undone. Not
# more than that: a sidecar whose own memory grows without end must still go before the rollout does.
_OOM_SCORES_UNDER_MPS = (-100, 0)


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
    """A running sidecar.

    Args:
        warm: it does what needs no GPU, says "waiting", and goes on when `go` is called; when we die it ends in order.

    Attributes:
        ready_fd: becomes readable with each line that it says, and with its end; -1 after the last line.
    """

    def __init__(
        self, record: RunRecord, run_file: Path, command: Sequence[str] = SIDECAR_COMMAND, *, warm: bool = False
    ) -> None:
        self._record = record
        self._successor_file = RunPaths(run_file).successor_file
        self._successor_file.unlink(missing_ok=True)
        self.log = Path(record.run_dir) / "sidecar.log"
        self._said_waiting = False
        self._told = not warm
        self._buffer = b""
        self.ready_fd, child_end = os.pipe()
        ends, arguments = [child_end], ["--run-file", str(run_file), "--ready-fd", str(child_end)]
        self._go_fd = -1
        if warm:
            go_end, self._go_fd = os.pipe()
            ends.append(go_end)
            arguments += ["--go-fd", str(go_end)]
        try:
            self.child: subprocess.Popen[bytes] = spawn(
                [*command, *arguments], env=sidecar_environment(record, os.environ), log=self.log, pass_fds=ends
            )
        except OSError as error:
            raise RunError(
                f"no sidecar can be started: {error}",
                f"see that {self.log.parent} is there and can be written to; then start the run again",
            ) from error
        finally:
            for end in ends:
                os.close(end)
        self._yield_to_the_rollout()

    @property
    def pid(self) -> int:
        """The PID of this life."""
        return self.child.pid

    @property
    def is_unplaced(self) -> bool:
        """Whether it is a warm one that has not been told to go on: it holds no GPU and nobody has sent it anything."""
        return not self._told

    @property
    def is_waiting(self) -> bool:
        """Whether it is warm, has said so, and waits to be told to go on."""
        return self._said_waiting and not self._told

    def go(self) -> bool:
        """Tell a warm one to go on, once; False when there was nothing to tell, or nobody to hear it."""
        if self._told:
            return False
        try:
            os.write(self._go_fd, b"g")
        except BrokenPipeError:
            # It has died while it waited; its end is noticed by itself.
            return False
        self._told = True
        return True

    def read_answers(self) -> list[dict[str, str]]:
        """Call when `ready_fd` is readable: the JSON lines that are complete; closes the pipe after the last one."""
        chunk = os.read(self.ready_fd, 65536)
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        answers: list[dict[str, str]] = [json.loads(line) for line in lines]
        self._said_waiting = self._said_waiting or any(answer["state"] == "waiting" for answer in answers)
        if not chunk or any(answer["state"] != "waiting" for answer in answers):
            self.close_pipe()
        return answers

    def close_pipe(self) -> None:
        """Stop listening for READY."""
        if self.ready_fd >= 0:
            os.close(self.ready_fd)
            self.ready_fd = -1

    def stop(self, grace_s: float, more_s: Callable[[], float] = lambda: 0.0) -> Ended:
        """End it: SIGTERM, time to drain and save, then the harder ways; as `process.stop`."""
        drain_s = 0.0 if self._record.device == "cpu" else GPU_DRAIN_SECONDS
        ended = stop(self.child, grace_s=grace_s, gpu_drain_s=drain_s, more_s=more_s)
        self.close()
        return ended

    def stop_for_a_successor(self, grace_s: float, more_s: Callable[[], float]) -> Ended:
        """The same for one that another follows, which needs what dead operators have left."""
        try:
            self._successor_file.touch(0o600)
        except OSError as error:
            log.warning("sidecar %d does not know that another one follows: %s", self.pid, error)
        return self.stop(grace_s, more_s)

    def log_tail(self, num_lines: int = 12) -> str:
        """The last lines of its log, for a message; "" when somebody has removed it."""
        try:
            with self.log.open(errors="replace") as file:
                return "".join(deque(file, num_lines)).strip()
        except OSError:
            return ""

    def close(self) -> None:
        """Close both pipes, once it has ended: a live one that waits would take it for our death."""
        self.close_pipe()
        if self._go_fd >= 0:
            os.close(self._go_fd)
            self._go_fd = -1

    def _yield_to_the_rollout(self) -> None:
        try:
            prefer_in_oom(self.pid, _OOM_SCORES_UNDER_MPS if self._record.mps == "on" else _OOM_SCORES)
            if self._record.device == "cpu":
                os.setpriority(os.PRIO_PROCESS, self.pid, _NICE_ON_CPU)
        except OSError:
            # Already gone, or a container that forbids it; neither is a reason to have no sidecar.
            return


def prefer_in_oom(pid: int, scores: Sequence[int]) -> int | None:
    """Give `pid` the first of the oom_score_adj values that the kernel grants; None when it grants none.

    Raises:
        OSError: the process is gone.
    """
    for score in scores:
        try:
            Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))
        except PermissionError:
            # Below what a privileged process has set (0, as a rule) only CAP_SYS_RESOURCE may go.
            continue
        return score
    return None

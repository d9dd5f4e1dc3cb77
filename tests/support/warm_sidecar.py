"""Sidecars that start within a fraction of a second: forked from a process that has imported everything already.

Run as a script it is that process: a JSON line on stdin asks, a JSON line on stdout answers. A forked sidecar is what
`python -m mps_trainer.sidecar` is after its imports; only they are spared. The parent has no threads, no locks and no
channels that a child could inherit. It ends with its stdin, and its sidecars with their supervisor's lock.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any


class WarmSidecars:
    """Starts, watches and reaps sidecars; a context manager."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._parent = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> WarmSidecars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(90)

    def start(self, run_file: Path, log: Path, death: str = "") -> int:
        """A sidecar of that run; its PID. With a `death` (`killed_at`) it kills itself there."""
        state = os.environ["MPS_TRAINER_STATE_DIR"]
        return int(self._ask(start=str(run_file), log=str(log), state=state, death=death))

    def exit_code(self, pid: int, *, wait: bool) -> int | None:
        """Exit code, or minus the signal; None while it lives. Reaped once, so ask no more after an answer."""
        found = self._ask(wait=pid, block=wait)
        return None if found is None else int(found)

    def _ask(self, **request: Any) -> Any:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(request) + "\n")
        self._parent.stdin.flush()
        answer = self._parent.stdout.readline()
        assert answer, "the warm parent has ended"
        return json.loads(answer)


class ColdSidecars:
    """The same, each a new interpreter: two or three seconds of processor time a start."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, run_file: Path, log: Path) -> int:
        """A sidecar of that run; its PID."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "mps_trainer.sidecar", "--run-file", str(run_file)]
        with log.open("ab") as out:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        self._children[child.pid] = child
        return child.pid

    def exit_code(self, pid: int, *, wait: bool) -> int | None:
        """Exit code, or minus the signal; None while it lives."""
        return self._children[pid].wait(90) if wait else self._children[pid].poll()


def _start(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(number, target)
        os.environ["MPS_TRAINER_STATE_DIR"] = request["state"]
        sys.argv[1:] = ["--run-file", request["start"]]
        if request["death"]:
            # One that does not come: the test is told SIGALRM.
            signal.alarm(120)
            importlib.import_module("killed_at").arm(request["death"])
        # On a slow machine too every step is taken before the end.
        importlib.import_module("mps_trainer.sidecar.draining").DRAIN_S = 90.0
        code = importlib.import_module("mps_trainer.sidecar.__main__").main()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(request: dict[str, Any]) -> int | None:
    pid, status = os.waitpid(request["wait"], 0 if request["block"] else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _serve() -> None:
    # Torch imports its compiler with the first optimizer, which takes as long as the rest of it.
    for module in ("mps_trainer.sidecar.service", "mps_trainer.tasks.preference_classifier", "torch._dynamo"):
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_start(request) if "start" in request else _wait(request)), flush=True)


if __name__ == "__main__":
    _serve()

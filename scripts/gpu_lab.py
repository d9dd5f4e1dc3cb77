"""For the GPU scripts: processes that start warm, and what the results say of the machine.

`WarmParent` imports torch once, without CUDA, and forks a child for each job. The child runs the job at the top of the
interpreter, so that it ends the way a real process ends: returns, exceptions and atexit handlers included.

    python scripts/gpu_lab.py      # is the warm parent itself; started by WarmParent
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from types import TracebackType
from typing import Any

from mps_trainer.mps.process import ProcessIdentity

SCRIPTS = Path(__file__).parent


@dataclass
class Job:
    """A child of the warm parent. `result` is the JSON that the job's function returned."""

    process: ProcessIdentity
    result_path: Path
    parent: WarmParent

    def wait(self, timeout_s: float) -> int | None:
        """The wait status as a shell shows it (negative: the signal); None when it still runs."""
        if not self.process.wait(timeout_s):
            return None
        return self.parent.reap(self.process.pid)

    def result(self, timeout_s: float) -> Any:
        """Wait for the job and return what it returned; a RuntimeError tells how it ended otherwise."""
        status = self.wait(timeout_s)
        if status is None:
            self.process.kill_drained(1.0)
            status = self.wait(10.0)
            raise RuntimeError(f"no result within {timeout_s} s (killed, {status})")
        text = self.result_path.read_text()
        self.result_path.unlink()
        reply = json.loads(text) if text else {"error": f"ended with status {status} and no result"}
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["value"]


class WarmParent:
    """A process with torch imported and no CUDA context, which forks jobs."""

    def __init__(self, log: Path) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])}
        with log.open("ab") as file:
            self._child = subprocess.Popen(
                [sys.executable, __file__],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._answer()

    def start(self, function: str, *args: Any, env: dict[str, str] | None = None) -> Job:
        """Run `module:function(*args)` in a fork, with these variables set before CUDA starts."""
        descriptor, path = mkstemp(prefix="mps-trainer-job-")
        os.close(descriptor)
        answer = self._ask({"function": function, "args": args, "env": env or {}, "result": path})
        identity = ProcessIdentity.of(answer["pid"])
        assert identity is not None  # it is at least a zombie until it is reaped
        return Job(identity, Path(path), self)

    def reap(self, pid: int) -> int:
        return int(self._ask({"reap": pid})["status"])

    def __enter__(self) -> WarmParent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(20)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the warm parent has ended ({self._child.poll()})")
        return dict(json.loads(line))


def machine() -> dict[str, str]:
    """What a result is worth nothing without."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    facts = {
        "gpu": ", ".join(
            _text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)))
            for i in range(pynvml.nvmlDeviceGetCount())
        ),
        "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
    pynvml.nvmlShutdown()
    return facts


def gpu_uuids() -> list[str]:
    """Full UUIDs in NVML's order."""
    import pynvml

    pynvml.nvmlInit()
    found = [
        _text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)))
        for i in range(pynvml.nvmlDeviceGetCount())
    ]
    pynvml.nvmlShutdown()
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _serve() -> dict[str, Any] | None:
    import torch

    torch.set_num_threads(1)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "reap" in request:
            status = os.waitpid(request["reap"], 0)[1]
            print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            return request
        print(json.dumps({"pid": pid}), flush=True)
    return None


def _run(request: dict[str, Any]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.environ.update(request["env"])
    module, _, name = request["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    try:
        reply = {"value": function(*request["args"])}
    except BaseException as error:
        Path(request["result"]).write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    Path(request["result"]).write_text(json.dumps(reply))


if __name__ == "__main__":
    job = _serve()
    if job is not None:
        _run(job)

"""For the GPU scripts: processes that start warm, and counters that they share.

`WarmParent` imports torch once, without CUDA, and forks a child for each job. The child runs the job at the top of the
interpreter, so that it ends the way a real process ends: returns, exceptions and atexit handlers included.

    python scripts/gpu_jobs.py [MODULE ...]     # is the warm parent itself; started by WarmParent
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from types import TracebackType
from typing import Any

from gpu_lab import SCRIPTS

from mps_trainer.run.process import ProcessIdentity


def kill_drained(process: ProcessIdentity, drain_s: float = 2.5) -> bool:
    """Stop a process, give the GPU `drain_s` seconds to finish what it has queued, then kill it.

    A client of MPS that is killed with much work queued takes the clients beside it along; a stopped one queues
    nothing more. False when it was gone already.
    """
    if not process.send(signal.SIGSTOP):
        return False
    process.wait(drain_s)
    return process.send(signal.SIGKILL)


class Counter:
    """Iterations, wrong results, a wish to stop and one to pause, shared through a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(32))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 32)

    def _get(self, i: int) -> int:
        return int(struct.unpack_from("q", self._map, 8 * i)[0])

    def _set(self, i: int, value: int) -> None:
        struct.pack_into("q", self._map, 8 * i, value)

    value = property(lambda self: self._get(0))
    errors = property(lambda self: self._get(1))
    stopping = property(lambda self: self._get(2))

    def tick(self, wrong: int) -> None:
        self._set(1, self.errors + wrong)
        self._set(0, self.value + 1)

    def reset(self) -> None:
        for i in range(4):
            self._set(i, 0)

    def stop(self) -> None:
        self._set(2, 1)

    def wait_for(self, value: int, timeout_s: float, job: Job | None = None) -> bool:
        """Whether the count reached `value` in time, while the job (if one is given) lived."""
        deadline = time.monotonic() + timeout_s
        while self.value < value:
            if time.monotonic() > deadline or (job is not None and not job.process.is_running):
                return self.value >= value
            time.sleep(0.005)
        return True


@dataclass
class Job:
    """A child of the warm parent. `result` is the JSON that the job's function returned."""

    process: ProcessIdentity
    result_path: Path
    parent: WarmParent
    status: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """The wait status as a shell shows it (negative: the signal); None when it still runs."""
        if self.status is None and self.process.wait(timeout_s):
            self.status = self.parent.reap(self.process.pid)
        return self.status

    def said(self) -> str:
        """What it left in its result file, which is deleted; for a job of which nobody wants a result."""
        text = self.result_path.read_text() if self.result_path.exists() else ""
        self.result_path.unlink(missing_ok=True)
        return text

    def result(self, timeout_s: float) -> Any:
        """Wait for the job and return what it returned; a RuntimeError tells how it ended otherwise."""
        status = self.wait(timeout_s)
        if status is None:
            kill_drained(self.process, 1.0)
            status = self.wait(10.0)
            raise RuntimeError(f"no result within {timeout_s} s (killed, {status})")
        text = self.result_path.read_text()
        self.result_path.unlink()
        reply = json.loads(text) if text else {"error": f"ended with status {status} and no result"}
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["value"]


class PopenLike:
    """A job behind the methods of a Popen, for the launcher's own `stop`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.pid = job.process.pid

    @property
    def returncode(self) -> int | None:
        return self._job.status

    def poll(self) -> int | None:
        return self._job.wait(0)

    def wait(self, timeout: float | None = None) -> int:
        limit = 60.0 if timeout is None else timeout
        status = self._job.wait(limit)
        if status is None:
            raise subprocess.TimeoutExpired(["job", str(self.pid)], limit)
        return status

    def send_signal(self, number: int) -> None:
        self._job.process.send(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmParent:
    """A process with torch (and `preload`) imported and no CUDA context, which forks jobs.

    Its end, or its owner's, is the end of the jobs that still run. Not thread-safe.
    """

    def __init__(self, log: Path, preload: Sequence[str] = ()) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])}
        with log.open("ab") as file:
            self._child = subprocess.Popen(
                [sys.executable, __file__, *preload],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                # A signal to the script's group must not look like the death of a victim.
                start_new_session=True,
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
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(5)

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


def _serve() -> dict[str, Any] | None:
    import torch

    torch.set_num_threads(1)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    children: set[int] = set()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "reap" in request:
            status = os.waitpid(request["reap"], 0)[1]
            children.discard(request["reap"])
            print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            return request
        children.add(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in children:
        # Not reaped yet, so that the PID is still theirs.
        os.kill(pid, signal.SIGKILL)
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

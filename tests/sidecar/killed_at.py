"""Real sidecars, killed with SIGKILL at one step, forked from one process that has imported everything already.

Run as a script it is that process: a JSON line on stdin names the run and the death ("take after 2"), a JSON line on
stdout says how the sidecar ended. A fork is what `python -m mps_trainer.sidecar` is after its imports, which take most
of the time of a short life.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mps_trainer.sidecar import checkpoint, startup
from mps_trainer.sidecar.__main__ import main
from mps_trainer.sidecar.journal import Journal
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.transport import Delivery

STEPS: dict[str, tuple[Any, str]] = {
    "append": (Journal, "append"),
    "take": (Learner, "take"),
    "release": (Delivery, "release"),
    "train_step": (Learner, "train_step"),
    "begin_next": (Journal, "begin_next"),
    "save_file": (checkpoint, "save_file"),
    "save_checkpoint": (startup, "save_checkpoint"),
    "drop_before": (Journal, "drop_before"),
    "evaluate": (Trainer, "evaluate"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killing(function: Callable[..., Any], when: str, countdown: int) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal countdown
        countdown -= 1
        if countdown == 0 and when == "before":
            die()
        result = function(*args, **kwargs)
        if countdown == 0:
            die()
        return result

    return wrapped


def torn_append(function: Callable[..., Any], countdown: int) -> Callable[..., Any]:
    def wrapped(journal: Journal, header: dict[str, Any], payload: memoryview) -> None:
        nonlocal countdown
        countdown -= 1
        function(journal, header, payload)
        if countdown == 0:
            path = journal._path(journal.number)
            os.truncate(path, path.stat().st_size - len(payload) // 2)
            die()

    return wrapped


def arm(death: str) -> None:
    """Let this process die where `death` says."""
    name, when, count = death.split()
    owner, attribute = STEPS[name]
    original = getattr(owner, attribute)
    wrapped = torn_append(original, int(count)) if when == "torn" else killing(original, when, int(count))
    setattr(owner, attribute, wrapped)


class Killed:
    """The process that forks them; a context manager, so that it ends with the tests that use it."""

    def __init__(self) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._parent = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **threads, "CUDA_VISIBLE_DEVICES": ""},
        )

    def __enter__(self) -> Killed:
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.communicate(timeout=30)

    def run(self, run_file: Path, log: Path, death: str) -> int:
        """Start a sidecar of that run, wait for its end; its exit code, or minus the signal."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        state = os.environ["MPS_TRAINER_STATE_DIR"]
        request = {"run_file": str(run_file), "log": str(log), "death": death, "state": state}
        self._parent.stdin.write(json.dumps(request) + "\n")
        self._parent.stdin.flush()
        return int(json.loads(self._parent.stdout.readline()))


def live(request: dict[str, str]) -> None:
    """What a forked process does."""
    signal.alarm(120)  # no death: the test is told SIGALRM
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.environ["MPS_TRAINER_STATE_DIR"] = request["state"]
    arm(request["death"])
    sys.argv[1:] = ["--run-file", request["run_file"]]
    code = 70
    try:
        code = main()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Fork a sidecar for each line, until stdin ends."""
    # Torch imports its compiler with the first optimizer, which takes as long as the rest of it.
    for module in ("mps_trainer.sidecar.service", "mps_trainer.tasks.preference_classifier", "torch._dynamo"):
        importlib.import_module(module)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            live(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve()

"""The real sidecar, killed with SIGKILL at one step: `killed_at.py NAME before|after N --run-file ... --ready-fd N`."""

from __future__ import annotations

import os
import signal
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


if __name__ == "__main__":
    name, when, count = sys.argv[1:4]
    sys.argv[1:4] = []
    owner, attribute = STEPS[name]
    original = getattr(owner, attribute)
    wrapped = torn_append(original, int(count)) if when == "torn" else killing(original, when, int(count))
    setattr(owner, attribute, wrapped)
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())

"""Deaths of a sidecar by SIGKILL at one step: "take after 2" dies after the second record that it takes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from mps_trainer.sidecar import checkpoint, startup
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

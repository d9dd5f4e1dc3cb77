"""The workbench: what a person uses while writing a task, before any run.

    learn            train a task on experiences, with a tenth held out; for a task's own tests
    read_recording   the experiences of a file that `mps-trainer record` wrote

Loaded on first use, so that the command line does not pay for torch. What `mps-trainer new-task` and `check-task` do is
in `new_task.py` and `check.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mps_trainer.operator.recording import RecordedExperience, RecordedId, read_recording
    from mps_trainer.workbench.learning import Learnt, learn

__all__ = ["Learnt", "RecordedExperience", "RecordedId", "learn", "read_recording"]

_HOMES = {
    "Learnt": "mps_trainer.workbench.learning",
    "RecordedExperience": "mps_trainer.operator.recording",
    "RecordedId": "mps_trainer.operator.recording",
    "learn": "mps_trainer.workbench.learning",
    "read_recording": "mps_trainer.operator.recording",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

"""Train a small auxiliary model beside vLLM on one GPU, fed by a Trinity-RFT run through shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mps_trainer.columns import Column
    from mps_trainer.tasks import AuxiliaryTask, Ragged, TaskBatch

__version__ = "0.1.0"
__all__ = ["AuxiliaryTask", "Column", "Ragged", "TaskBatch", "__version__"]

# Resolved on first use (PEP 562): the launcher and the command line must not pay for torch.
_HOMES = {
    "AuxiliaryTask": "mps_trainer.tasks",
    "Column": "mps_trainer.columns",
    "Ragged": "mps_trainer.tasks",
    "TaskBatch": "mps_trainer.tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

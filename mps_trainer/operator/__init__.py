"""The operator: `mps_trainer.operator.AuxTrainer`, the name to write into Trinity's YAML.

`AuxTrainer` is loaded on first use, so that the extraction and the use of scores can be imported where
Trinity is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mps_trainer.operator.aux_trainer import AuxTrainer

__all__ = ["AuxTrainer"]


def __getattr__(name: str) -> Any:
    if name == "AuxTrainer":
        from mps_trainer.operator.aux_trainer import AuxTrainer

        return AuxTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

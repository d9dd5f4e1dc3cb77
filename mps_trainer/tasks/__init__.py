"""Auxiliary tasks: what a user implements, the batch that it sees, and the built-in tasks."""

from mps_trainer.columns import Column
from mps_trainer.tasks.base import AuxiliaryTask
from mps_trainer.tasks.batch import Ragged, TaskBatch
from mps_trainer.tasks.registry import BUILT_IN_TASKS, load_task, prepare_task, wire_columns

__all__ = [
    "BUILT_IN_TASKS",
    "AuxiliaryTask",
    "Column",
    "Ragged",
    "TaskBatch",
    "load_task",
    "prepare_task",
    "wire_columns",
]

"""Every exception that mps_trainer raises on purpose.

    MpsTrainerError
    |-- ConfigError(ValueError)          the user's YAML or arguments cannot work
    |-- ExperienceError(ValueError)      an experience lacks what the task asks for
    |-- TaskError(RuntimeError)          the user's auxiliary task raised, or its loss is not finite
    |-- TransportError(OSError)          shared memory could not be created, attached or trusted
    |   `-- CorruptRecordError           bytes in shared memory that do not add up
    |-- RunError(RuntimeError)           a run could not be started, found or stopped
    |   `-- AlreadyRunningError          another run holds this config
    |-- PlacementError(RuntimeError)     the wanted device or MPS mode is not possible here
    `-- GpuFaultError(RuntimeError)      the CUDA context is dead: a device-side assert, an illegal address

A message says what was found, what was needed and what to do. Each class is also the standard type that it
replaces, and survives pickling, because Ray moves exceptions between processes.
"""

from __future__ import annotations


class MpsTrainerError(Exception):
    """Base of every error of this package. `found` and `todo` end up in one readable message."""

    def __init__(self, message: str, todo: str = "") -> None:
        super().__init__(message, todo)
        self.message = message
        self.todo = todo

    def __str__(self) -> str:
        return f"{self.message}\n  What to do: {self.todo}" if self.todo else self.message


class ConfigError(MpsTrainerError, ValueError):
    """The configuration cannot work: an unknown key, a wrong type, a combination that contradicts itself."""


class ExperienceError(MpsTrainerError, ValueError):
    """An experience does not hold a column that the task declared, or holds it with another width."""


class TaskError(MpsTrainerError, RuntimeError):
    """The auxiliary task failed: it does not import, it raised, or its loss is not finite."""


class TransportError(MpsTrainerError, OSError):
    """Shared memory could not be created, attached or trusted."""


class CorruptRecordError(TransportError):
    """Bytes in shared memory do not form a record: a wrong length, offset, schema or checksum."""


class RunError(MpsTrainerError, RuntimeError):
    """A run could not be started, found or stopped."""


class AlreadyRunningError(RunError):
    """Another run holds this config; two sidecars on one config would write the same files."""


class PlacementError(MpsTrainerError, RuntimeError):
    """The wanted device or MPS mode is not possible on this machine."""


class GpuFaultError(MpsTrainerError, RuntimeError):
    """The CUDA context of this process is dead, so nothing more can be done on the GPU, nor copied from it."""

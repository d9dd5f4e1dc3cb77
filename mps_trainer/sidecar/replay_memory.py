"""Whether a batch and a full replay buffer fit into this machine's memory: asked at the start, not found out later.

The buffer stands in the memory of the host whatever the device. It fills slowly, so without this question a
`replay_capacity` that is too large ends the sidecar, or by the kernel's choice the rollout, in the middle of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from mps_trainer.columns import Column
from mps_trainer.config import Settings
from mps_trainer.errors import ConfigError

_log = logging.getLogger(__name__)
_MIB = 2**20
#: A numpy array of its own (its object and malloc's share), and the pointer to it.
_ARRAY_BYTES = 136
#: Two objects of a text while a batch is made: its str or bytes, and the pointer to it.
_TEXT_BYTES = 64
_MAX_OFFSET = 2**31 - 1
#: A remembered id of about 50 characters in an OrderedDict; 2 * capacity are remembered.
_KNOWN_ID_BYTES = 260
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def row_bytes(columns: Sequence[Column]) -> int:
    """The most bytes that one experience takes in the replay buffer."""
    total = 2 * _KNOWN_ID_BYTES
    for column in columns:
        if column.kind == "text":
            total += (column.maximum or 0) + _ARRAY_BYTES
        elif column.kind == "ragged":
            total += (column.maximum or 0) * np.dtype(column.dtype).itemsize + _ARRAY_BYTES
        else:
            total += column.max_row_bytes
    return total


def batch_row_bytes(columns: Sequence[Column]) -> int:
    """The least bytes that the longest experience takes in a batch: the rows it is made of, and the batch itself."""
    objects = sum(_TEXT_BYTES for column in columns if column.kind == "text")
    return 2 * sum(column.max_row_bytes for column in columns) + objects


def check_replay_memory(
    columns: Sequence[Column], settings: Settings, device: str, available: int | None = None
) -> None:
    """ConfigError when a batch or the full buffer exceeds the memory that is available (bytes; None: read it now).

    A warning when it exceeds `memory:` on the CPU, where that is a wish and not a limit.
    """
    available = available_memory() if available is None else available
    _check_batch(columns, settings.batch_size, available)
    each = row_bytes(columns)
    full = settings.replay_capacity * each
    found = (
        f"the replay buffer takes up to {full // _MIB} MiB: replay_capacity {settings.replay_capacity} experiences "
        f"of at most {each} bytes"
    )
    if full > available:
        # Half of it, because the rollout lives on the same memory and a checkpoint copies the buffer.
        fitting = available // 2 // each
        raise ConfigError(
            f"{found}; this machine has {available // _MIB} MiB available",
            f"lower replay_capacity to {fitting} or less, or lower the columns' maxima"
            if fitting
            else "lower the columns' maxima",
        )
    if device == "cpu" and settings.memory is not None and full > settings.memory:
        fitting = settings.memory // each
        _log.warning(
            "%s; memory: wishes for %d MiB. To keep to it, lower replay_capacity to %d",
            found, settings.memory // _MIB, fitting,
        )  # fmt: skip


def _check_batch(columns: Sequence[Column], batch_size: int, available: int) -> None:
    """Only what the batch itself needs: the task's activations and gradients, which come on top, nobody knows yet."""
    each = batch_row_bytes(columns)
    longest = max((column.maximum or 1 for column in columns), default=1)
    # Half of it, for the task's own tensors; and offsets into a column have 32 bits.
    fitting = min(available // 2 // each, _MAX_OFFSET // longest)
    todo = f"lower batch_size to {fitting} or less" if fitting else "lower the columns' maxima"
    if batch_size * each > available:
        raise ConfigError(
            f"a batch takes up to {batch_size * each // _MIB} MiB: batch_size {batch_size} experiences of at most "
            f"{each} bytes; this machine has {available // _MIB} MiB available",
            todo,
        )
    if batch_size * longest > _MAX_OFFSET:
        raise ConfigError(
            f"batch_size {batch_size} experiences with sequences of up to {longest} elements are more than "
            f"{_MAX_OFFSET} elements in one column of a batch",
            todo,
        )


def available_memory() -> int:
    """Bytes that a process may still take; a container's own limit counts as the machine's."""
    available: int = psutil.virtual_memory().available
    for limit_path, used_path in _CGROUPS:
        try:
            limit, used = Path(limit_path).read_text().strip(), Path(used_path).read_text().strip()
        except (FileNotFoundError, PermissionError):
            continue
        # Version 1 writes "no limit" as a number near 2**63.
        if limit.isdigit() and int(limit) < 2**60:
            return min(available, max(int(limit) - int(used), 0))
    return available

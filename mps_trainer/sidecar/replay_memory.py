"""Whether a batch and a full replay buffer fit into this machine's memory: asked at the start, not found out later.

The buffer stands in the memory of the host whatever the device. It fills slowly, so without this question a
`replay_capacity` that is too large ends the sidecar, or by the kernel's choice the rollout, in the middle of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mps_trainer.columns import Column
from mps_trainer.config import Settings
from mps_trainer.errors import ConfigError
from mps_trainer.run.host_memory import read_memory
from mps_trainer.sidecar.row_bytes import largest_row_bytes, smallest_row_bytes

_log = logging.getLogger(__name__)
_MIB = 2**20
#: Two objects of a text while a batch is made: its str or bytes, and the pointer to it.
_TEXT_BYTES = 64
_MAX_OFFSET = 2**31 - 1
#: A remembered id of about 50 characters in an OrderedDict; 2 * capacity are remembered.
_KNOWN_ID_BYTES = 260


def row_bytes(columns: Sequence[Column]) -> int:
    """The most bytes that one experience takes in the replay buffer, with the ids that are remembered."""
    return 2 * _KNOWN_ID_BYTES + largest_row_bytes(columns)


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
    available = read_memory()[1] if available is None else available
    _check_batch(columns, settings.batch_size, available)
    full, found = _full_buffer(columns, settings)
    which = "replay_capacity" if settings.replay_bytes is None else "replay_bytes"
    if full > available:
        # Half of it, because the rollout lives on the same memory and a checkpoint copies the buffer.
        fitting = _fitting(available // 2, columns, settings)
        raise ConfigError(
            f"{found}; this machine has {available // _MIB} MiB available",
            f"lower {which} to {fitting} or less, or lower the columns' maxima"
            if fitting != "0"
            else "lower the columns' maxima",
        )
    if device == "cpu" and settings.memory is not None and full > settings.memory:
        fitting = _fitting(settings.memory, columns, settings)
        _log.warning(
            "%s; memory: wishes for %d MiB. To keep to it, lower %s to %s",
            found, settings.memory // _MIB, which, fitting,
        )  # fmt: skip


def _full_buffer(columns: Sequence[Column], settings: Settings) -> tuple[int, str]:
    """Bytes of the full buffer, and where the number comes from. ConfigError when `replay_bytes` is too few."""
    each = row_bytes(columns)
    full = settings.replay_capacity * each
    words = f"replay_capacity {settings.replay_capacity} experiences of at most {each} bytes"
    limit = settings.replay_bytes
    if limit is not None:
        least = settings.min_experiences * largest_row_bytes(columns)
        if limit < least:
            raise ConfigError(
                f"replay_bytes, {limit} bytes, may hold fewer than the {settings.min_experiences} experiences of "
                f"min_experiences, which take up to {least} bytes",
                f"raise replay_bytes to {-(-least // _MIB)}MiB or more, or lower min_experiences or the maxima",
            )
        # Twice, because places of experiences that have left keep their scalars and vectors.
        most = 2 * limit + 2 * _KNOWN_ID_BYTES * min(settings.replay_capacity, limit // smallest_row_bytes(columns))
        if most < full:
            full, words = most, f"replay_bytes {limit // _MIB} MiB, with places of experiences that have left, and ids"
    return full, f"the replay buffer takes up to {full // _MIB} MiB: {words}"


def _fitting(available: int, columns: Sequence[Column], settings: Settings) -> str:
    if settings.replay_bytes is None:
        return str(available // row_bytes(columns))
    share = 2 + 2 * _KNOWN_ID_BYTES / smallest_row_bytes(columns)
    return f"{int(available / share) // _MIB}MiB"


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

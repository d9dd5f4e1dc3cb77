"""metrics.jsonl: one line for each batch, and one for every so many steps; the same numbers for TensorBoard.

A line has a `kind`:

    batch   a batch has been scored, evaluated and trained on
    step    a batch with many steps is under way
    pause   nothing is launched from here on (`paused` 1, with the reason), or work goes on (0)
    resume  a successor went on from a checkpoint: batches after `batch` are told again below

All times are in milliseconds, `t` in seconds since the epoch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from typing import Any

import numpy as np

from mps_trainer.columns import Array
from mps_trainer.run.quantiles import quantiles_of
from mps_trainer.sidecar.own_files import OwnFiles

_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends lines to metrics.jsonl and, once `open_tensorboard` has found it installed, to an event file.

    A line that cannot be written is lost and told in `own`; the next one is tried again.
    """

    def __init__(self, own: OwnFiles) -> None:
        self._own = own
        self._run_dir = own.run_dir
        self._descriptor = -1
        self._board: Any = None
        self._append(b"")

    def open_tensorboard(self) -> None:
        """Write event files too when `tensorboard` is installed. Called after READY, since the import takes long."""
        try:
            from mps_trainer.sidecar.tensorboard import EventFile

            self._board = EventFile(self._run_dir / "tensorboard")
        except ImportError as error:
            _log.info("no TensorBoard files: %s", error)
        except Exception as error:  # noqa: BLE001  # an optional extra: a broken one (protobuf's versions) must not end us
            _log.warning("no TensorBoard files, the installed one fails: %s: %s", type(error).__name__, error)

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """One line; numbers that do not exist yet are null."""
        now = time.time()
        self._append(json.dumps({"kind": kind, "t": round(now, 3), **values}).encode() + b"\n")
        if self._board is not None and kind != "resume":
            try:
                self._board.write(now, values["step"], values)
            except OSError as error:
                # A record that is cut short ends an event file for its readers.
                self._own.failed("tensorboard", error)
                self._drop_board()

    def begin_again(self) -> None:
        """Open both files anew: somebody has removed them."""
        had_board = self._board is not None
        self.close()
        self._append(b"")
        if had_board:
            self.open_tensorboard()

    def close(self) -> None:
        """Close both files. Calling it again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._drop_board()

    def _append(self, line: bytes) -> None:
        try:
            if self._descriptor < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self._run_dir / "metrics.jsonl", flags, 0o600)
            size = os.fstat(self._descriptor).st_size
            if os.write(self._descriptor, line) != len(line):
                os.ftruncate(self._descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._own.failed("metrics.jsonl", error)
        else:
            self._own.works("metrics.jsonl")

    def _drop_board(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            with contextlib.suppress(OSError):
                board.close()


def quantiles(scores: list[Array]) -> list[float] | None:
    """The quantiles of all scores of a batch, None when none were asked for."""
    return quantiles_of(np.concatenate(scores)) if scores else None

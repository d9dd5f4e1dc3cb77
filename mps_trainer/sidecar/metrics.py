"""metrics.jsonl: one line for each batch, and one for every so many steps; the same numbers for TensorBoard.

A line has a `kind`:

    batch   a batch has been scored, evaluated and trained on
    step    a batch with many steps is under way
    pause   nothing is launched from here on (`paused` 1, with the reason), or work goes on (0)
    resume  a successor went on from a checkpoint: batches after `batch` are told again below

All times are in milliseconds, `t` in seconds since the epoch.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from mps_trainer.columns import Array

_log = logging.getLogger(__name__)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class MetricsLog:
    """Appends lines to metrics.jsonl and, once `open_tensorboard` has found it installed, to an event file."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._file = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self._board: Any = None

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
        self._file.write(json.dumps({"kind": kind, "t": round(now, 3), **values}) + "\n")
        if self._board is not None and kind != "resume":
            self._board.write(now, values["step"], values)

    def close(self) -> None:
        """Close both files. Calling it again does nothing."""
        self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None


def quantiles(scores: list[Array]) -> list[float] | None:
    """The `QUANTILES` of all scores of a batch, None when none were asked for."""
    if not scores:
        return None
    return [round(float(value), 6) for value in np.quantile(np.concatenate(scores), QUANTILES)]

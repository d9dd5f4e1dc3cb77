"""How many experiences are scored in one pass through the model, on a shared GPU.

Beside an engine that computes prompts a kernel of ours waits for the engine's, a quarter of a millisecond or more on an
H200 (`docs/results/gpu_stream_priority.md`). The time to scores is then the number of kernels, not their work: one pass
over 1,024 experiences has a quarter of the kernels of four over 256.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from mps_trainer.columns import Column, PackedBatch
from mps_trainer.errors import TaskError
from mps_trainer.sidecar.gpu.faults import is_gpu_fault
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.worst_case import worst_case_batch

_log = logging.getLogger(__name__)
#: Passes of `batch_size` in a wide one.
TIMES = 4
#: A pass that takes longer is bound by its work, also beside an engine: fewer kernels would not help.
_QUICK_S = 0.5


class AskingWidth:
    """Finds the width after the first dry step, and proves it in the second one, which is in the reservation.

    Args:
        worst: the largest batch of `batch_size` that `columns` allow.
        room: bytes that a wide pass may take even where a training step takes less.
    """

    def __init__(self, trainer: Trainer, columns: Sequence[Column], worst: PackedBatch, room: int) -> None:
        self._trainer = trainer
        self._columns = columns
        self._worst = worst
        self._room = room
        self._is_found = False

    def settle(self) -> None:
        """Call after each dry step. Sets `rows_asked` where a pass is quick and a wide one has room.

        Raises:
            TaskError: the GPU's context broke, or a width that was found has no room in the reservation.
        """
        if not self._is_found:
            self._is_found = True
            if not self._is_quick():
                return
            most = max(self._room, torch.cuda.max_memory_allocated(self._trainer.device))
            try:
                self._ask(TIMES * self._trainer.batch_size)
            except TaskError as error:
                if is_gpu_fault(error):
                    raise
                self._stay_narrow()
            else:
                if torch.cuda.max_memory_allocated(self._trainer.device) > most:
                    self._stay_narrow()
            _log.info("scores are given for up to %d experiences in one pass", self._trainer.rows_asked)
        elif self._trainer.rows_asked > self._trainer.batch_size:
            self._ask(self._trainer.rows_asked)

    def _is_quick(self) -> bool:
        started = time.perf_counter()
        self._trainer.score(self._worst)
        return time.perf_counter() - started < _QUICK_S

    def _ask(self, rows: int) -> None:
        self._trainer.rows_asked = rows
        wide = worst_case_batch(self._columns, rows)
        self._trainer.score(wide)
        self._trainer.evaluate(wide)
        self._trainer.metrics()

    def _stay_narrow(self) -> None:
        self._trainer.rows_asked = self._trainer.batch_size
        # What the attempt took must not count as the need of the step.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._trainer.device)
        self._trainer.dry_step(self._worst)

"""What a shared GPU's memory is divided into, and how wide a scoring pass is, with a mocked driver: no GPU here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mps_trainer.columns import Column, PackedBatch
from mps_trainer.errors import TaskError
from mps_trainer.sidecar.gpu import reservation
from mps_trainer.sidecar.gpu.asking_width import TIMES, AskingWidth
from mps_trainer.sidecar.worst_case import worst_case_batch

MIB = 2**20
COLUMNS = (Column(name="reward", source="reward"),)


class StandInTrainer:
    """Counts its passes; a scoring pass takes `bytes_of_a_row` for each experience."""

    def __init__(self, bytes_of_a_row: int, error: str = "") -> None:
        self.device = torch.device("cuda")
        self.batch_size = self.rows_asked = 8
        self.peak = 0
        self.asked: list[int] = []
        self.steps = 0
        self._row, self._error = bytes_of_a_row, error

    def dry_step(self, packed: PackedBatch) -> None:
        self.steps += 1
        self.peak = max(self.peak, 100)
        self.score(packed)

    def score(self, packed: PackedBatch) -> None:
        self.asked.append(packed.num_rows)
        if packed.num_rows > self.batch_size and self._error:
            raise TaskError(self._error, "nothing")
        self.peak = max(self.peak, self._row * packed.num_rows)

    def evaluate(self, packed: PackedBatch) -> None:
        self.score(packed)

    def metrics(self) -> dict[str, float]:
        return {}


@pytest.fixture
def settle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def settled(trainer: Any, room: int = 0) -> AskingWidth:
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: trainer.peak)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(trainer, "peak", 0))
        trainer.peak = 100
        width = AskingWidth(trainer, COLUMNS, worst_case_batch(COLUMNS, trainer.batch_size), room)
        width.settle()
        return width

    return settled


def test_scoring_is_wide_where_it_takes_less_than_a_step_with_a_mocked_driver(settle: Any) -> None:
    trainer = StandInTrainer(bytes_of_a_row=3)
    width = settle(trainer)
    assert trainer.rows_asked == TIMES * 8
    trainer.asked.clear()
    width.settle()
    assert trainer.asked == [32, 32], "the width is proven in the reservation"


def test_scoring_is_wide_where_the_reservation_has_room_with_a_mocked_driver(settle: Any) -> None:
    trainer = StandInTrainer(bytes_of_a_row=4)
    settle(trainer, room=128)
    assert trainer.rows_asked == TIMES * 8
    assert trainer.steps == 0


@pytest.mark.parametrize(
    "trainer", [StandInTrainer(bytes_of_a_row=4), StandInTrainer(bytes_of_a_row=1, error="score ran out of memory")]
)
def test_scoring_stays_narrow_where_a_wide_pass_takes_more_with_a_mocked_driver(settle: Any, trainer: Any) -> None:
    width = settle(trainer)
    assert trainer.rows_asked == 8
    assert trainer.steps == 1, "the peak is measured anew, without the attempt"
    assert trainer.peak == 100
    width.settle()
    assert trainer.steps == 1


def test_a_broken_gpu_is_told_and_no_width_is_sought_with_a_mocked_driver(settle: Any) -> None:
    with pytest.raises(TaskError, match="device-side assert"):
        settle(StandInTrainer(bytes_of_a_row=1, error="score broke the GPU context: CUDA error: device-side assert"))


def test_the_pool_has_segments_for_as_many_small_tensors_as_the_step_had_with_a_mocked_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LoRA's adapters and their optimizer found no room in a pool of one large segment (seen on an H200)."""
    taken: list[int] = []

    def take(num_bytes: int, device: torch.device) -> torch.Tensor:
        taken.append(num_bytes)
        return torch.empty(0)

    stats = {"reserved_bytes.small_pool.peak": 200 * MIB}
    monkeypatch.setattr(reservation, "_bytes", take)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: sum(n for n in taken if n == MIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: None)
    monkeypatch.setattr(reservation, "memory_info", lambda: (0, 2**37))
    device = torch.device("cuda")
    reservation.Reservation.take(device, 1024 * MIB, small_bytes=reservation.small_peak(device))
    assert taken.count(MIB) == 250
    assert 1024 * MIB - 250 * MIB in taken, "the rest is one segment"
    taken.clear()
    reservation.Reservation.take(device, 1024 * MIB)
    assert taken.count(MIB) * MIB == reservation.SMALL_POOL

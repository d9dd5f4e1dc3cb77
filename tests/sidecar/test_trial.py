"""What probation asks of a task, in this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tried_tasks
from torch._C._autograd import DeviceType

from mps_trainer.columns import IDENTITY_COLUMNS, Column
from mps_trainer.config import load_settings
from mps_trainer.errors import MpsTrainerError, TaskError
from mps_trainer.sidecar import probation
from mps_trainer.sidecar.hard_batches import hard_batch
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.trial import TaskTrial, TrialReport, is_uncontained_fault, longest_kernel
from mps_trainer.tasks import AuxiliaryTask, TaskBatch, wire_columns

SETTINGS = load_settings({"batch_size": 48})


def try_out(task: AuxiliaryTask, seconds: float = 30.0) -> tuple[TrialReport, list[str]]:
    told: list[str] = []
    trial = TaskTrial(Trainer(task, 48, 0), wire_columns(task), SETTINGS, told.append, seconds)
    return trial.run(), told


@pytest.mark.parametrize("task", [tried_tasks.Good(), tried_tasks.Frozen()], ids=["plain", "frozen"])
def test_a_good_task_passes(task: AuxiliaryTask) -> None:
    report, told = try_out(task)
    assert report.steps == 20
    assert report.warnings == []
    assert report.longest_kernel == ""
    assert "training step 1 of 20, 48 experiences with every sequence at its maximum" in told
    assert "training step 2 of 20, 32 experiences with sequences of different lengths" in told
    assert any("length 0" in line for line in told)


def test_a_slow_task_takes_one_step_of_each_kind() -> None:
    assert try_out(tried_tasks.Good(), seconds=0)[0].steps == 3


def test_values_that_only_the_user_can_judge_are_a_warning() -> None:
    report, _ = try_out(tried_tasks.SmallVocabulary())
    [warning] = report.warnings
    assert warning.startswith("with large whole numbers in its columns: task SmallVocabulary")
    assert "raised" in warning


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (tried_tasks.Nan, "the loss is nan"),
        (tried_tasks.MeanOfNothing, "nan|not finite"),
        (tried_tasks.WrongShape, r"must give a tensor of shape \(48,\)"),
        (tried_tasks.WrongDtype, r"score\(\) gave torch\.bool"),
        (tried_tasks.SteepSlope, "the gradient of weight is not finite, but the loss is"),
        (tried_tasks.LearnsNothing, "no parameter changed in 20 training steps"),
        (tried_tasks.ChangesItsBatch, r"loss\(\) changed the batch \(column reward\)"),
        (tried_tasks.Exits, "loss raised SystemExit"),
    ],
)
def test_what_a_task_cannot_do_is_named(task: type[AuxiliaryTask], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        try_out(task())


def test_hard_batches_hold_every_length_and_single_ones_the_length_asked_for() -> None:
    columns = (*IDENTITY_COLUMNS, *tried_tasks.Good().columns(), Column(name="v", source="info.v", shape=(3,)))
    rng = np.random.default_rng(0)
    batch = hard_batch(columns, 64, rng)
    lengths = np.diff(batch["tokens"].offsets)
    assert {0, 1, 64} < set(lengths)
    assert set(batch["reward"].values) == {0, 1}
    assert len({batch["eid"].text(i) for i in range(64)}) == 64
    assert max(len(batch["words"].row(i)) for i in range(64)) == 32
    empty = TaskBatch.from_packed(hard_batch(columns, 1, rng, length=0))
    assert empty.ragged("tokens").values.numel() == 0
    assert empty.texts["words"] == [""]
    large = hard_batch(columns, 64, rng, stretch="large numbers")
    assert {-1e4, 0.0, 1e4} < set(large["v"].values.flatten())
    assert hard_batch(columns, 64, rng, stretch="large whole numbers")["tokens"].values.max() == 200_000


def test_forks_and_cuda_at_import_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(_: str) -> None:
        return

    settings = load_settings({"task": "tried_tasks:ForksAtOnce"})
    with pytest.raises(TaskError, match=r"forked 1 process\(es\) when it was imported or made"):
        probation._load(settings)
    with pytest.raises(TaskError, match=r"called sys\.exit\(5\)"):
        probation._load(load_settings({"task": "tried_tasks:ExitsAtOnce"}))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(TaskError, match="used CUDA when it was imported or made"):
        probation._load(load_settings({"task": "tried_tasks:Good"}))


def event(name: str, microseconds: float, device: Any = DeviceType.CUDA, annotation: bool = False) -> SimpleNamespace:
    elapsed = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(name=name, time_range=elapsed, device_type=device, is_user_annotation=annotation)


def test_the_longest_kernel_among_a_profilers_recorded_events() -> None:
    events = [
        event("gemm", 6200),
        event("relu", 10),
        event("Memcpy HtoD (Pinned -> Device)", 90_000),
        event("Optimizer.step#AdamW.step", 80_000),
        event("my range", 70_000, annotation=True),
        event("aten::mm", 60_000, DeviceType.CPU),
    ]
    assert longest_kernel(events) == ("gemm", 6.2)
    assert longest_kernel([]) == ("", 0.0)


ILLEGAL = (
    "task T, step 3: loss raised AcceleratorError: CUDA error: an illegal memory access was encountered\nSearch for"
)
ASSERT = "task T, step 3: loss raised AcceleratorError: CUDA error: device-side assert triggered\nSearch for"


def test_gpu_faults_are_told_apart_by_recorded_messages() -> None:
    assert is_uncontained_fault(ILLEGAL)
    assert not is_uncontained_fault(ASSERT)
    assert not is_uncontained_fault("CUDA error: out of memory")
    assert not is_uncontained_fault("CUDA error: no kernel image is available for execution on the device")
    found, todo = probation.explain(TaskError(ILLEGAL, "x"))
    assert found.endswith("encountered: a GPU fault, which beside vLLM takes the engine along")
    assert "compute-sanitizer" in todo
    found, todo = probation.explain(RuntimeError(ASSERT))
    assert found.endswith("triggered: an index is out of range on the GPU")
    assert "embedding" in todo
    found, todo = probation.explain(MpsTrainerError("loss raised X", "the traceback is in sidecar.log"))
    assert (found, todo) == ("loss raised X", "the traceback is in probation.log")

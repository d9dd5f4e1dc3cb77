from __future__ import annotations

import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path

import broken_tasks
import numpy as np
import pytest
import torch
from real_sidecar import token_rows
from torch import Tensor, nn

from mps_trainer.columns import IDENTITY_COLUMNS, Column, PackedBatch
from mps_trainer.errors import RunError, TaskError
from mps_trainer.sidecar.checkpoint import Checkpoint, checkpoints, load_newest, save_checkpoint
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.worst_case import worst_case_batch
from mps_trainer.tasks import AuxiliaryTask, TaskBatch, load_task, wire_columns
from mps_trainer.transport import decode_batch, encode_batch

TASK = load_task("preference_classifier", {"max_tokens": 64, "num_buckets": 64, "hidden_size": 16, "dropout": 0.5})
COLUMNS = wire_columns(TASK)


def batch(size: int, seed: int = 0) -> PackedBatch:
    return decode_batch(encode_batch(token_rows(np.random.default_rng(seed), size), COLUMNS), COLUMNS)


def new_trainer(seed: int = 0, batch_size: int = 32) -> Trainer:
    return Trainer(TASK, batch_size, seed)


def assert_same_model(one: Trainer, two: Trainer) -> None:
    for (name, a), (_, b) in zip(one.model.state_dict().items(), two.model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def rewards(*values: float) -> PackedBatch:
    rows = {"eid": [f"e{i}" for i in range(len(values))], "group": ["t"] * len(values), "reward": np.float32(values)}
    return decode_batch(encode_batch(rows, IDENTITY_COLUMNS), IDENTITY_COLUMNS)


def test_more_than_a_batch_is_scored_in_parts_with_the_same_result() -> None:
    small, large = new_trainer(batch_size=7), new_trainer(batch_size=100)
    np.testing.assert_allclose(small.score(batch(50)), large.score(batch(50)), rtol=1e-5)
    for one, two in zip(small.evaluate(batch(50)) or (), large.evaluate(batch(50)) or (), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


class CountsFeatures(AuxiliaryTask):
    """Counts how often it makes its features."""

    made = 0

    def columns(self) -> Sequence[Column]:
        return []

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def features(self, batch: TaskBatch) -> Tensor:
        self.made += 1
        return batch["reward"].unsqueeze(1)

    def ask(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        found: Tensor = model(batch.once("features", lambda: self.features(batch))).squeeze(1)
        return found

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return self.ask(model, batch).square().mean()

    score = ask

    def predictions(self, model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        return self.ask(model, batch), batch["reward"]


def test_features_are_made_once_for_the_scores_and_the_predictions_of_a_record() -> None:
    task = CountsFeatures()
    trainer = Trainer(task, 4, 0)
    record, another = rewards(1, 0, 1), rewards(0, 0, 1)
    scores = trainer.score(record)
    pair = trainer.evaluate(record)
    assert pair is not None
    assert (task.made, list(pair[0])) == (1, list(scores))
    trainer.evaluate(record)
    assert task.made == 2  # nothing is kept longer than that
    trainer.score(record)
    pair = trainer.evaluate(another)
    assert pair is not None
    assert task.made == 4
    assert list(pair[0]) != list(scores)
    trainer.score(record)
    trainer.train_step(record)
    trainer.evaluate(record)
    assert task.made == 7


def test_of_a_record_in_parts_one_part_is_there_at_a_time() -> None:
    there: list[weakref.ref[TaskBatch]] = []
    features: list[weakref.ref[Tensor]] = []

    def to_batch(packed: PackedBatch) -> TaskBatch:
        # On a GPU the reservation was proven with one.
        assert [one() for one in [*there, *features]] == [None] * len([*there, *features])
        there.append(weakref.ref(batch := TaskBatch.from_packed(packed)))
        return batch

    class Notes(CountsFeatures):
        def features(self, batch: TaskBatch) -> Tensor:
            made = super().features(batch)
            features.append(weakref.ref(made))
            return made

    trainer = Trainer(Notes(), 2, 0, to_batch=to_batch)
    for _ in range(2):
        trainer.score(rewards(1, 0, 1, 0, 1))
        trainer.evaluate(rewards(1, 0, 1, 0, 1))
    assert len(there) == len(features) == 12
    trainer.score(rewards(1, 0))
    trainer.score(rewards(0, 1))


def test_a_record_that_was_scored_is_not_kept_alive() -> None:
    trainer, record = Trainer(CountsFeatures(), 4, 0), rewards(1, 0, 1)
    trainer.score(record)
    last = weakref.ref(record)
    del record
    assert last() is None


def test_neither_asking_nor_the_dry_step_changes_what_training_does() -> None:
    # One after the other: both draw their dropout from torch's one generator.
    plain = new_trainer()
    expected = [plain.train_step(batch(32, seed=i)) for i in range(5)]
    asked = new_trainer()
    asked.dry_step(worst_case_batch(COLUMNS, 32))
    assert asked.step == 0
    found = []
    for i in range(5):
        asked.score(batch(40, seed=i))
        asked.evaluate(batch(40, seed=i))
        torch_draw_in_score(asked)
        found.append(asked.train_step(batch(32, seed=i)))
    assert found == expected
    assert_same_model(plain, asked)


def torch_draw_in_score(trainer: Trainer) -> None:
    trainer.task, task = Dice(), trainer.task
    trainer.score(rewards(1, 2))
    trainer.task = task


def test_the_worst_case_has_every_column_at_its_maximum() -> None:
    columns = (
        *IDENTITY_COLUMNS,
        Column(name="v", source="info.v", shape=(5,), dtype="float16"),
        Column(name="r", source="tokens", shape=(None,), dtype="int64", maximum=9),
        Column(name="b", source="info.b", dtype="bool"),
        Column(name="t", source="response_text", dtype="text", maximum=11),
    )
    worst = worst_case_batch(columns, 4)
    assert worst["v"].values.shape == (4, 5)
    assert worst["v"].values.dtype == np.float16
    assert worst["b"].values.dtype == np.bool_
    assert [len(worst["r"].row(i)) for i in range(4)] == [9] * 4
    assert [len(worst["t"].text(i)) for i in range(4)] == [11] * 4
    assert len({worst["eid"].text(i) for i in range(4)}) == 4
    tensors = TaskBatch.from_packed(worst)
    assert tensors.ragged("r").padded(3).shape == (4, 3)


class BadScore(broken_tasks.Plain):
    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return torch.log(batch["reward"])


class Dice(broken_tasks.Plain):
    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return torch.rand(batch.size)


class NoTensor(broken_tasks.Plain):
    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return 0.5  # type: ignore[return-value]


def test_what_goes_wrong_in_a_task_is_told_with_step_and_experiences() -> None:
    with pytest.raises(TaskError, match=r"step 0: loss raised KeyError.*\(experiences e0, e1, e2, e3, e4 and 2 more\)"):
        Trainer(broken_tasks.RaisesInLoss(), 8, 0).train_step(rewards(*range(7)))
    with pytest.raises(TaskError, match=r"the loss is nan.*e0, e1\)"):
        Trainer(broken_tasks.NanWhenNegative(), 8, 0).train_step(rewards(1, -1))
    with pytest.raises(TaskError, match=r"1 of 3 scores are not finite.*\(experiences e1\)"):
        Trainer(BadScore(), 8, 0).score(rewards(1, -1, 1))
    with pytest.raises(TaskError, match=r"must give a tensor of shape \(3,\)"):
        Trainer(broken_tasks.WrongShape(), 8, 0).score(rewards(1, 2, 3))
    with pytest.raises(TaskError, match=r"float.*must give a tensor"):
        Trainer(NoTensor(), 8, 0).train_step(rewards(1))


@pytest.mark.parametrize("end", [SystemExit(0), KeyboardInterrupt(), type("Panic", (BaseException,), {})()])
def test_a_task_that_ends_the_process_is_a_task_error(end: BaseException) -> None:
    class Ends(broken_tasks.Plain):
        def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
            raise end

    with pytest.raises(TaskError, match=f"loss raised {type(end).__name__}"):
        Trainer(Ends(), 8, 0).train_step(rewards(1))


def test_a_checkpoint_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    trainer, successor = new_trainer(), new_trainer(seed=9)
    for i in range(3):
        trainer.train_step(batch(32, seed=i))
    save_checkpoint(tmp_path, trainer, Checkpoint(replay={"x": np.arange(3)}, state={"note": "here"}), keep=2)
    expected = [trainer.train_step(batch(32, seed=i)) for i in range(3)]
    found = load_newest(tmp_path, successor)
    assert found is not None
    assert (found.state["note"], found.state["step"], found.replay["x"].tolist()) == ("here", 3, [0, 1, 2])
    assert [successor.train_step(batch(32, seed=i)) for i in range(3)] == expected
    assert_same_model(trainer, successor)


def test_only_the_newest_are_kept_and_half_ones_do_not_count(tmp_path: Path) -> None:
    trainer = new_trainer()
    assert load_newest(tmp_path, trainer) is None
    for _ in range(4):
        trainer.train_step(batch(32))
        save_checkpoint(tmp_path, trainer, Checkpoint(replay={}, state={}), keep=2)
    save_checkpoint(tmp_path, trainer, Checkpoint(replay={}, state={"again": 1}), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-4", "step-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4"]
    (tmp_path / ".step-9.1.tmp").mkdir()
    (tmp_path / "step-4" / "model.safetensors").write_bytes(b"half")
    found = load_newest(tmp_path, trainer)
    assert found is not None
    assert found.state["step"] == 3
    # Killed between the two renames of a second checkpoint at one step.
    (tmp_path / "step-3").rename(tmp_path / ".step-3.77.old")
    found = load_newest(tmp_path, trainer)
    assert found is not None
    assert found.state["step"] == 3


def test_a_copy_beside_the_checkpoints_is_none(tmp_path: Path) -> None:
    trainer = new_trainer()
    trainer.train_step(batch(32))
    path = save_checkpoint(tmp_path, trainer, Checkpoint(replay={}, state={}), keep=2)
    shutil.copytree(path, tmp_path / f"{path.name}.bak")
    assert checkpoints(tmp_path) == [path]


def test_no_usable_checkpoint_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    trainer = new_trainer()
    path = save_checkpoint(tmp_path, trainer, Checkpoint(replay={}, state={}), keep=1)
    (path / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match="none of the 1 checkpoints"):
        load_newest(tmp_path, trainer)


class TensorRate(broken_tasks.Plain):
    """A learning rate that is a tensor, as capturable optimizers want it."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))


class OddOption(broken_tasks.Plain):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(model.parameters()), "odd": object()}], lr=0.1)


def test_options_of_the_optimizer_that_are_no_numbers(tmp_path: Path) -> None:
    trainer = Trainer(TensorRate(), 8, 0)
    trainer.train_step(rewards(1, 2))
    save_checkpoint(tmp_path / "a", trainer, Checkpoint(replay={}, state={}), keep=1)
    assert load_newest(tmp_path / "a", Trainer(TensorRate(), 8, 0)) is not None
    odd = Trainer(OddOption(), 8, 0)
    with pytest.raises(TaskError, match="keeps a object"):
        save_checkpoint(tmp_path / "b", odd, Checkpoint(replay={}, state={}), keep=1)
    assert checkpoints(tmp_path / "b") == []


def test_tied_weights_survive_a_checkpoint(tmp_path: Path) -> None:
    class Tied(broken_tasks.Plain):
        def build_model(self) -> nn.Module:
            model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
            model[1].weight = model[0].weight
            return model

    trainer, successor = Trainer(Tied(), 8, 0), Trainer(Tied(), 8, 1)
    trainer.train_step(rewards(1, 2))
    save_checkpoint(tmp_path, trainer, Checkpoint(replay={}, state={}), keep=1)
    load_newest(tmp_path, successor)
    assert_same_model(trainer, successor)
    assert successor.model[1].weight is successor.model[0].weight


class ProbabilityTask(broken_tasks.Plain):
    """Valid on rewards of 0 or 1 and on positive columns, as many are."""

    def columns(self) -> list[Column]:
        return [Column(name="price", source="info.price"), Column(name="odds", source="info.odds", shape=(3,))]

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        predicted = torch.sigmoid(model(batch["price"].log().unsqueeze(1)).squeeze(1))
        return nn.functional.binary_cross_entropy(predicted, batch["reward"])

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return (batch["odds"] / (1 - batch["odds"])).log().sum(1)


def test_the_worst_case_suits_tasks_on_labels_probabilities_and_positive_numbers() -> None:
    task = ProbabilityTask()
    Trainer(task, 32, 0).dry_step(worst_case_batch(wire_columns(task), 32))


def test_long_ids_are_cut_in_messages() -> None:
    worst = worst_case_batch(IDENTITY_COLUMNS, 8)
    with pytest.raises(TaskError, match=r"\(experiences 0-made-up-x+\.\.\., 1-made-up-.* and 3 more\)") as caught:
        Trainer(broken_tasks.RaisesInLoss(), 8, 0).train_step(worst)
    assert len(caught.value.message) < 400


class CallableOption(broken_tasks.Plain):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(model.parameters()), "schedule": lambda step: step}], lr=0.1)


class KeyOption(broken_tasks.Plain):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(model.parameters()), "by_layer": {(1, 2): 0.1}}], lr=0.1)


@pytest.mark.parametrize("task", [CallableOption, KeyOption])
def test_an_optimizer_that_no_checkpoint_holds_fails_in_the_dry_step(task: type[broken_tasks.Plain]) -> None:
    with pytest.raises(TaskError, match="which a checkpoint cannot hold"):
        Trainer(task(), 8, 0).dry_step(worst_case_batch(IDENTITY_COLUMNS, 8))


class Counts(broken_tasks.Plain):
    numbers: dict[str, object] = {}  # noqa: RUF012

    def metrics(self) -> dict[str, float]:
        return self.numbers  # type: ignore[return-value]


def test_a_tasks_own_numbers_are_finite_floats() -> None:
    trainer = Trainer(Counts(), 8, 0)
    Counts.numbers = {"pairs": torch.tensor(3), "share": float("nan"), "steps": True}
    assert trainer.metrics() == {"pairs": 3.0, "steps": 1.0}
    Counts.numbers = {"pairs": "many"}
    with pytest.raises(TaskError, match="metrics raised ValueError"):
        trainer.metrics()
    assert new_trainer().metrics() == {}

"""`score_where: operator`: the numbers of the sidecar, from its weights, on the CPU of another process."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mps_trainer.columns import PackedBatch
from mps_trainer.config import load_settings
from mps_trainer.errors import PlacementError, TaskError, TransportError
from mps_trainer.sidecar import publishing
from mps_trainer.sidecar.publishing import Publisher, Snapshots, snapshots_for
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.worst_case import worst_case_batch
from mps_trainer.tasks import AuxiliaryTask, TaskBatch, load_task, wire_columns
from mps_trainer.tasks.model_weights import describe_weights, load_weights, weights_bytes
from mps_trainer.tasks.random_state import seed_everything
from mps_trainer.tasks.snapshot_scorer import SnapshotScorer
from mps_trainer.transport import leftovers
from mps_trainer.transport.sweep import remove_run

TASKS = {
    "preference_classifier": {"max_tokens": 16, "num_buckets": 32, "hidden_size": 16, "dropout": 0.5},
    "token_outlier": {"max_tokens": 16},
    "pass_rate": {},
}
FAR = float("inf")


def as_rows(packed: PackedBatch) -> dict[str, Any]:
    rows = {}
    for name, column in packed.columns.items():
        cells = [column.text(i) if column.is_text else column.row(i) for i in range(packed.num_rows)]
        rows[name] = column.values if column.offsets is None and column.values.ndim == 1 else cells
    return rows


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"s{secrets.token_hex(6)}"
    yield name
    remove_run(name)
    assert leftovers(name) == []


@pytest.mark.parametrize("name", TASKS)
def test_the_same_weights_give_the_same_scores(run_id: str, name: str) -> None:
    task = load_task(name, TASKS[name])
    columns = wire_columns(task)
    trainer = Trainer(task, batch_size=16, seed=3)
    publisher = Publisher(trainer, run_id, 0.0)
    scorer = SnapshotScorer(load_task(name, TASKS[name]), columns, run_id, batch_size=7)
    packed = worst_case_batch(columns, 40)
    assert not scorer.refresh()
    assert not scorer.has_weights
    before: Any = None
    for _ in range(2):
        for _ in range(3):
            trainer.train_step(worst_case_batch(columns, 16))
        # Due or not: on a busy machine the first one may take so long that the second one is not due yet.
        publisher.publish()
        threads, state = torch.get_num_threads(), torch.get_rng_state()
        assert scorer.refresh()
        assert not scorer.refresh()
        found = scorer.score(as_rows(packed), FAR)
        np.testing.assert_allclose(found, trainer.score(packed), rtol=1e-5, atol=1e-6)
        assert (scorer.version, scorer.trained_ns) == (trainer.step, trainer.trained_ns)
        assert torch.get_num_threads() == threads
        assert torch.equal(torch.get_rng_state(), state), "the actor's random numbers go on as they would have"
        assert before is None or not np.allclose(before, found), "the test cannot tell one model from another"
        before = found
    publisher.close()
    assert not scorer.refresh()
    np.testing.assert_array_equal(scorer.score(as_rows(packed), FAR), before)
    assert np.isnan(scorer.score(as_rows(packed), time.monotonic() - 1)).all(), "too late for every part"
    scorer.close()


class Sum(AuxiliaryTask):
    """A model of one number, of the type that the test asks for."""

    def __init__(self, dtype: str = "float32", width: int = 1, wrong: str = "") -> None:
        self.dtype, self.width, self.wrong = dtype, width, wrong

    def columns(self) -> list[Any]:
        return []

    def build_model(self) -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(torch.full((self.width,), 2.0).to(getattr(torch, self.dtype)))
        model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        model.register_buffer("nothing", torch.zeros((0, 3), dtype=torch.bool))
        return model

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return (model.weight.float() * batch["reward"].mean()).sum()

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        if self.wrong == "raises":
            raise ValueError("no")
        scale = torch.nan if self.wrong == "nan" else model.weight.float().sum()
        return batch["reward"] * scale


ROWS = {"eid": ["a", "b"], "group": ["t", "t"], "reward": np.float32([1, 3])}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_kind_of_number_arrives_bit_for_bit(run_id: str, dtype: str) -> None:
    trainer = Trainer(Sum(dtype), 8, 0)
    publisher = Publisher(trainer, run_id, 0.0)
    with torch.no_grad():
        trainer.model.weight.fill_(1 / 3)
        trainer.model.seen += 5
    publisher.publish()
    scorer = SnapshotScorer(Sum(dtype), wire_columns(Sum()), run_id, 8)
    scorer.refresh()
    state = scorer._model.state_dict() if scorer._model is not None else {}
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(state[name], tensor)
    scorer.close()
    publisher.close()


class Drawing(Sum):
    """Draws from every generator of the process."""

    def build_model(self) -> nn.Module:
        self.draw()
        return super().build_model()

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        self.draw()
        return super().score(model, batch)

    def draw(self) -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()


def test_the_process_goes_on_as_if_nothing_had_been_drawn(run_id: str) -> None:
    publisher = Publisher(Trainer(Drawing(), 8, 0), run_id, 0.0)
    publisher.publish()
    seed_everything(5)
    expected = Drawing().draw()
    seed_everything(5)
    scorer = SnapshotScorer(Drawing(), wire_columns(Sum()), run_id, 8)
    scorer.refresh()
    scorer.score(ROWS, FAR)
    assert Drawing().draw() == expected
    scorer.close()
    publisher.close()


def test_a_file_that_another_holds_is_no_reason_to_give_up_for_good(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "TAKE_S", 0.05)
    first = Publisher(Trainer(Sum(), 8, 0), run_id, 0.0)
    with pytest.raises(TransportError, match="another process writes"):
        Publisher(Trainer(Sum(), 8, 0), run_id, 0.0)
    first.close()
    Publisher(Trainer(Sum(), 8, 0), run_id, 0.0).close()


def test_another_model_in_the_operator_is_an_error_with_every_batch(run_id: str) -> None:
    publisher = Publisher(Trainer(Sum(), 8, 0), run_id, 0.0)
    publisher.publish()
    scorer = SnapshotScorer(Sum(width=2), wire_columns(Sum()), run_id, 8)
    for _ in range(2):
        with pytest.raises(TaskError, match=r"(?s)another one than build_model.*weight.*same version"):
            scorer.refresh()
        assert not scorer.has_weights
    scorer.close()
    publisher.close()


@pytest.mark.parametrize(("wrong", "match"), [("raises", "raised ValueError: no"), ("nan", "not finite")])
def test_a_task_that_fails_in_the_operator_is_named(run_id: str, wrong: str, match: str) -> None:
    publisher = Publisher(Trainer(Sum(), 8, 0), run_id, 0.0)
    publisher.publish()
    scorer = SnapshotScorer(Sum(wrong=wrong), wire_columns(Sum()), run_id, 8)
    scorer.refresh()
    with pytest.raises(TaskError, match=match):
        scorer.score(ROWS, FAR)
    scorer.close()
    publisher.close()


def test_a_state_that_is_no_tensor_is_refused_by_name() -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(TaskError, match="_extra_state of dict"):
        describe_weights(Odd())
    with pytest.raises(TaskError, match="of complex64"):
        describe_weights(nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]))


def test_a_model_that_changes_its_shape_is_named_and_harms_no_snapshot(run_id: str) -> None:
    trainer = Trainer(Sum(), 8, 0)
    publisher = Publisher(trainer, run_id, 0.0)
    publisher.publish()
    trainer.model.weight = nn.Parameter(torch.ones(5))
    with pytest.raises(TaskError, match="not those that it had at the start: weight has 20 bytes"):
        publisher.publish()
    scorer = SnapshotScorer(Sum(), wire_columns(Sum()), run_id, 8)
    assert scorer.refresh()
    np.testing.assert_array_equal(scorer.score(ROWS, FAR), [2, 6])
    scorer.close()
    publisher.close()


def test_tied_weights_travel_too() -> None:
    model, other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    load_weights(other, zip(describe_weights(model), weights_bytes(model), strict=True))
    assert torch.equal(other[1].weight, model[0].weight)


def test_snapshots_come_at_most_so_often_and_take_a_small_share(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(publishing.time, "monotonic", lambda: now[0])
    trainer = Trainer(Sum(), 8, 0)
    publisher = Publisher(trainer, run_id, 5.0)
    written: list[float] = []
    monkeypatch.setattr(publisher._writer, "publish", lambda *a, **k: written.append(now[0]))

    def learn_until(until: float) -> list[float]:
        written.clear()
        while now[0] < until:
            trainer.trained_ns += 1
            publisher.publish_if_due()
            now[0] += 1.0
        return written

    assert learn_until(111) == [100, 105, 110]
    now[0] = 200.0
    trainer.trained_ns += 1
    publisher.publish_if_due()
    publisher.publish_if_due()
    assert written[3:] == [200], "nothing was learnt since the last one"

    def slow(*args: Any, **kwargs: Any) -> None:
        written.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(publisher._writer, "publish", slow)
    now[0] = 300.0
    assert learn_until(345) == [300, 321, 342], "one that takes a second is written every twenty"
    publisher.close()


def test_without_room_the_start_fails_and_later_the_training_goes_on(
    run_id: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    trainer = Trainer(Sum(), 8, 0)
    publisher = Publisher(trainer, run_id, 0.0)
    publisher.close()
    remove_run(run_id)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(PlacementError, match=r"(?s)needs \d+ bytes.*--shm-size"):
            Publisher(trainer, run_id, 0.0)
    publisher = Publisher(trainer, run_id, 0.0)
    from mps_trainer.transport import weights_file

    weights_file.unlink(run_id)
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        publisher.publish()
        publisher.publish()
    assert caplog.text.count("were not published") == 1
    assert publisher.trained_ns == 0
    publisher.publish()
    assert publisher.trained_ns == trainer.trained_ns
    publisher.close()


@pytest.mark.parametrize(
    ("args", "kind"),
    [({}, Snapshots), ({"use": "filter"}, Snapshots),
     ({"use": "filter", "score_where": "operator"}, Publisher)],
)  # fmt: skip
def test_only_who_needs_them_pays_for_snapshots(run_id: str, args: dict[str, Any], kind: type) -> None:
    found = snapshots_for(load_settings(args), Trainer(Sum(), 8, 0), run_id)
    assert type(found) is kind
    found.close()

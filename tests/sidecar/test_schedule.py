"""When the learner trains, and on what."""

from __future__ import annotations

import json
import math
import random
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import broken_tasks
import numpy as np
import pytest
import torch
from real_sidecar import token_rows
from sidecar_waits import wait_until
from test_learner import COLUMNS, TASK, batch, name
from torch import Tensor, nn

from mps_trainer import TaskBatch
from mps_trainer.config import Settings, load_settings
from mps_trainer.errors import ConfigError, TaskError
from mps_trainer.run.exit_codes import OK
from mps_trainer.sidecar.checkpoint import Checkpoint, load_newest, save_checkpoint
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.trainer import Trainer, check_sampling, make_trainer
from mps_trainer.tasks import load_task
from mps_trainer.transport import decode_batch, encode_batch


def new_learner(task: Any = TASK, **settings: Any) -> Learner:
    resolved = load_settings({"min_experiences": 10, "batch_size": 16, **settings})
    replay = ReplayBuffer(COLUMNS, 100, 0, None, resolved.replay)
    return Learner(make_trainer(task, resolved), replay, resolved)


def drawn_by(learner: Learner) -> list[list[str]]:
    """The ids of each step that will be taken."""
    steps: list[list[str]] = []
    learner.on_step = lambda rows: steps.append([rows["eid"].text(i) for i in range(rows.num_rows)])
    return steps


def train_all(learner: Learner) -> None:
    while learner.steps_due:
        learner.train_step()


def test_training_after_every_third_batch_only() -> None:
    learner = new_learner(schedule={"train_every": 3}, steps_per_batch=2)
    due = []
    for number in range(7):
        learner.take(name(number), batch(20, 20 * number))
        due.append(learner.steps_due)
        train_all(learner)
    assert due == [0, 0, 2, 0, 0, 2, 0]


def test_passes_take_each_new_experience_once() -> None:
    learner = new_learner(schedule={"train": "epochs", "epochs": 2, "train_every": 2})
    steps = drawn_by(learner)
    for number in range(4):
        learner.take(name(number), batch(20, 20 * number))
        train_all(learner)
    assert [len(step) for step in steps] == [16, 16, 8] * 4
    passes = [[*chain(*steps[i : i + 3])] for i in range(0, 12, 3)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(f"e{i}" for i in range(40))
    assert sorted(passes[2]) == sorted(passes[3]) == sorted(f"e{i}" for i in range(40, 80))
    assert passes[0] != passes[1]
    assert learner.counters.trained == 160


def test_passes_wait_for_enough_experiences_and_go_on_after_a_restart() -> None:
    learner, successor = (new_learner(schedule={"train": "epochs", "epochs": 3}, min_experiences=30) for _ in range(2))
    learner.take(name(0), batch(20))
    assert learner.steps_due == 0
    learner.take(name(1), batch(20, 20))
    assert learner.steps_due == 9, "the first batch too"
    for _ in range(4):
        learner.train_step()
    arrays, state = learner.state()
    successor.load_state(arrays, json.loads(json.dumps(state)))
    found, expected = drawn_by(successor), drawn_by(learner)
    train_all(successor)
    train_all(learner)
    assert found == expected
    assert len(found) == 5


def test_passes_go_on_without_experiences_that_were_set_aside() -> None:
    learner = new_learner(schedule={"train": "epochs"})
    learner.take(name(0), batch(40))
    learner.remove([f"e{i}".encode() for i in range(10)])
    steps = drawn_by(learner)
    train_all(learner)
    assert sorted(chain(*steps)) == sorted(f"e{i}" for i in range(10, 40))


def test_passes_skip_a_step_whose_experiences_have_all_left() -> None:
    learner = new_learner(schedule={"train": "epochs"})
    learner.take(name(0), batch(16))
    learner.replay.add(batch(100, 16))
    learner.take(name(1), batch(20, 116))
    steps = drawn_by(learner)
    train_all(learner)
    assert all(steps)
    assert learner.steps_due == 0


def test_continuous_training_ends_when_the_experiences_were_drawn_often_enough() -> None:
    learner = new_learner(schedule={"train": "continuous", "max_replays": 2.5})
    assert not learner.may_train
    learner.take(name(0), batch(32))
    assert learner.steps_due == 0
    steps = 0
    while learner.may_train:
        learner.train_step()
        steps += 1
        assert steps < 100
    assert steps == math.ceil(2.5 * 32 / 16)
    learner.take(name(1), batch(32, 32))
    assert learner.may_train, "what is new has not been drawn"
    assert not new_learner().may_train


def test_priority_training_learns_where_the_loss_is() -> None:
    learner = new_learner(replay={"sampling": "priority"}, steps_per_batch=1)
    learner.take(name(0), batch(90))
    before = learner.replay._tags["priority"][:90].copy()
    steps = drawn_by(learner)
    learner.train_step()
    changed = {f"e{i}" for i in np.flatnonzero(learner.replay._tags["priority"][:90] != before)}
    assert changed == set(steps[0])


def test_importance_weights_are_on_the_losses_and_without_them_losses_are_the_loss() -> None:
    settings = load_settings({"replay": {"sampling": "priority"}, "batch_size": 16})
    rows = batch(16)
    # One after the other: a trainer seeds the generators, and dropout draws from them.
    plain = Trainer(TASK, 16, 0)
    expected = plain.train_step(rows)
    by_experience = make_trainer(TASK, settings)
    assert by_experience.train_step(rows) == pytest.approx(expected)
    losses = by_experience.losses
    assert losses is not None
    assert losses.shape == (16,)
    torch.testing.assert_close(dict(by_experience.model.state_dict()), dict(plain.model.state_dict()))
    again = make_trainer(TASK, settings)
    weights = np.linspace(0, 1, 16, dtype=np.float32)
    assert again.train_step(rows, weights) == pytest.approx(float((losses * weights).mean()))


def test_classes_are_the_tasks_own_or_whether_there_was_a_reward() -> None:
    rows = batch(32)
    reward = rows["reward"].values
    assert Trainer(TASK, 16, 0).classes(rows).tolist() == (reward > reward.mean()).astype(int).tolist()
    assert Trainer(broken_tasks.Plain(), 16, 0).classes(rows).tolist() == (reward > 0.5).astype(int).tolist()
    learner = new_learner(replay={"class_balance": True}, batch_size=60)
    rare = token_rows(np.random.default_rng(0), 90) | {"outcome": (np.arange(90) % 10 == 0).astype(np.float32)}
    learner.take(name(0), decode_batch(encode_batch(rare, COLUMNS), COLUMNS))
    assert learner.trainer.classes(learner.replay.sample(60)).sum() == 30


class Fractions(broken_tasks.Plain):
    def classes(self, batch: TaskBatch) -> Tensor:
        return batch["reward"] / 3


class TooMany(broken_tasks.Plain):
    def classes(self, batch: TaskBatch) -> Tensor:
        return torch.arange(batch.size) + 250


@pytest.mark.parametrize("task", [Fractions(), TooMany()])
def test_classes_that_are_none(task: Any) -> None:
    with pytest.raises(TaskError, match="whole numbers from 0 to 255"):
        Trainer(task, 16, 0).classes(batch(32))


def test_priority_needs_losses_and_says_so() -> None:
    settings = load_settings({"replay": {"sampling": "priority"}, "task": "token_outlier"})
    with pytest.raises(ConfigError, match=r"TokenOutlier has no losses\(\)") as caught:
        check_sampling(load_task("token_outlier", {}), settings)
    assert "losses(model, batch)" in caught.value.todo
    for task in ("preference_classifier", "pass_rate"):
        check_sampling(load_task(task, {}), settings)
    check_sampling(load_task("token_outlier", {}), Settings())


class DrawsNumbers(broken_tasks.Plain):
    """Augments its batch with every generator that a user may think of."""

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        noise = torch.rand(1) + float(np.random.standard_normal()) + random.gauss(0, 1)
        return super().loss(model, batch) * (1 + noise).square().squeeze()

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        np.random.random(3)
        random.random()
        return super().score(model, batch)


def test_every_generator_of_a_task_goes_on_after_a_restart_and_scoring_does_not_disturb_it(tmp_path: Path) -> None:
    rows = batch(8)
    # An odd number of steps: numpy and Python then hold the second half of a pair of Gaussians.
    one = Trainer(DrawsNumbers(), 8, 7)
    for _ in range(3):
        one.train_step(rows)
    save_checkpoint(tmp_path, one, Checkpoint(replay={}, state={}), keep=1)
    expected = [one.train_step(rows) for _ in range(3)]
    other = Trainer(DrawsNumbers(), 8, 8)
    load_newest(tmp_path, other)
    found = []
    for _ in range(3):
        other.score(rows)
        found.append(other.train_step(rows))
    assert found == expected


def test_a_continuous_sidecar_trains_between_batches_and_answers_and_ends_when_asked(make_run: Any) -> None:
    run = make_run(batch_size=32, schedule={"train": "continuous", "max_replays": 1e9}, checkpoint_every=5)
    child, _ = run.start()
    with run.channel() as channel:
        run.wait_for_attach(channel)
        for request in range(2):
            rows = token_rows(np.random.default_rng(request), 64, 64 * request)
            channel.send(rows, request_id=request, want_scores=True)
            assert channel.receive_scores(request, timeout_s=90) is not None
            steps = run.status().version
            # More than the 50 steps after which a line in the metrics falls due.
            wait_until(lambda steps=steps: run.status().version > steps + 60, limit_s=90)
        assert run.status().batches == 2
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) == OK
    assert run.status().trained == 32 * run.status().version
    assert [line["kind"] for line in run.metrics() if line["kind"] == "step"], "steps are told between batches too"
    assert len(list((run.run_dir / "checkpoints").glob("step-*"))) == 2

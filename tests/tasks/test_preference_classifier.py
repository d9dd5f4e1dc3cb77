from __future__ import annotations

import numpy as np
import pytest
import torch
from token_stream import LENGTH, TokenStream, pack_ragged

from mps_trainer.columns import PackedBatch, PackedColumn
from mps_trainer.errors import ConfigError
from mps_trainer.sidecar.auc import area_under_curve
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.tasks import TaskBatch, load_task, wire_columns


def prequential_auc(stream: TokenStream, num_experiences: int = 2048, seed: int = 0) -> tuple[float, float, float]:
    """AUC on the first and the last 512 experiences before training on them, and of the score on planted outliers."""
    torch.set_num_threads(1)
    task = load_task("preference_classifier", {"max_tokens": 64})
    trainer = Trainer(task, batch_size=256, seed=seed)
    replay = ReplayBuffer(wire_columns(task), capacity=8192, seed=seed)
    predicted, came_true, scores, planted = [], [], [], []
    for _ in range((num_experiences + 512) // 128):
        batch = stream.batch(128)
        evaluation = trainer.evaluate(batch)
        assert evaluation is not None
        predicted.append(evaluation[0])
        came_true.append(evaluation[1])
        scores.append(trainer.score(batch))
        planted.append(stream.flipped)
        replay.add(batch)
        for _ in range(4):
            trainer.train_step(replay.sample(256))
    first = area_under_curve(np.concatenate(predicted[:4]), np.concatenate(came_true[:4]))
    last = area_under_curve(np.concatenate(predicted[-4:]), np.concatenate(came_true[-4:]))
    outliers = area_under_curve(np.concatenate(scores[-4:]), np.concatenate(planted[-4:]).astype(np.float32))
    assert first is not None
    assert last is not None
    return first, last, outliers if outliers is not None else float("nan")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_a_random_rule_over_tokens(seed: int) -> None:
    first, last, _ = prequential_auc(TokenStream(seed))
    assert last >= 0.9
    assert last > first


def test_scores_of_planted_outliers_are_high() -> None:
    _, last, outliers = prequential_auc(TokenStream(4, noise=0.05))
    assert last >= 0.85  # a twentieth of the labels is wrong, so even the rule itself reaches 0.95 only
    assert outliers >= 0.85


@pytest.mark.parametrize("kind", ["order", "shuffle"])
def test_order_and_chance_cannot_be_learnt(kind: str) -> None:
    _, last, _ = prequential_auc(TokenStream(5, kind=kind))  # type: ignore[arg-type]
    assert 0.4 <= last <= 0.6


def test_a_permuted_response_gets_the_same_score() -> None:
    task = load_task("preference_classifier", {})
    model = task.build_model().eval()
    batch = TokenStream(6).batch(8)
    order = np.random.default_rng(0).permutation(LENGTH)
    permuted = {
        name: pack_ragged([batch[name].row(i)[order] for i in range(8)]) if name in ("tokens", "logprobs") else column
        for name, column in batch.columns.items()
    }
    scores = [task.score(model, TaskBatch.from_packed(PackedBatch(c, 8))) for c in (batch.columns, permuted)]
    torch.testing.assert_close(scores[0], scores[1])


def test_a_feature_vector_is_learnt() -> None:
    rng = np.random.default_rng(0)
    task = load_task("preference_classifier", {"feature": "hidden", "feature_dim": 16, "label": "group_mean"})
    assert {c.name: c.source for c in wire_columns(task)}["features"] == "info.hidden"
    assert {c.name: c.source for c in wire_columns(task)}["baseline"] == "group.reward_mean"
    trainer = Trainer(task, batch_size=64, seed=0)

    def batch() -> PackedBatch:
        features = (rng.standard_normal((64, 16)) * 100).astype(np.float32)
        outcome = (features[:, 0] > features[:, 1]).astype(np.float32)
        stream = TokenStream(7).batch(64).columns
        return PackedBatch(
            {
                **{name: stream[name] for name in ("eid", "group", "reward")},
                "outcome": PackedColumn(outcome),
                "baseline": PackedColumn(np.full(64, 0.5, np.float32)),
                "features": PackedColumn(features),
            },
            64,
        )

    for _ in range(60):
        trainer.train_step(batch())
    evaluation = trainer.evaluate(batch())
    assert evaluation is not None
    auc = area_under_curve(*evaluation)
    assert auc is not None
    assert auc > 0.9


def test_label_may_be_a_number_and_score_the_preference() -> None:
    task = load_task("preference_classifier", {"label": 0.7, "score": "preference", "depth": 0})
    assert "baseline" not in {c.name for c in wire_columns(task)}
    model = task.build_model().eval()
    batch = TaskBatch.from_packed(TokenStream(8).batch(16))
    predictions = task.predictions(model, batch)
    assert predictions is not None
    torch.testing.assert_close(task.score(model, batch), predictions[0])
    assert torch.equal(predictions[1], (batch["outcome"] > 0.7).float())


def test_empty_responses_have_finite_scores() -> None:
    task = load_task("preference_classifier", {})
    columns = dict(TokenStream(9).batch(2).columns)
    columns["tokens"] = pack_ragged([np.zeros(0, np.int32)] * 2)
    columns["logprobs"] = pack_ragged([np.zeros(0, np.float32)] * 2)
    assert torch.isfinite(task.score(task.build_model(), TaskBatch.from_packed(PackedBatch(columns, 2)))).all()


@pytest.mark.parametrize(
    ("task_args", "word"),
    [
        ({"label": "mean"}, "batch_mean"),
        ({"score": "best"}, "outlier"),
        ({"feature_dim": 0}, "feature_dim"),
        ({"max_tokens": "many"}, "max_tokens"),
    ],
)
def test_a_wrong_argument_names_itself(task_args: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_task("preference_classifier", task_args)


def test_logprobs_of_masked_tokens_do_not_overflow() -> None:
    from mps_trainer.tasks import Ragged

    task = load_task("preference_classifier", {})
    tensors = {
        "tokens": Ragged(torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0, 3])),
        "logprobs": Ragged(torch.full((3,), torch.finfo(torch.float32).min), torch.tensor([0, 3])),
        "outcome": torch.ones(1),
        "baseline": torch.zeros(1),
    }
    assert task.score(task.build_model(), TaskBatch(tensors, {}, 1)).isfinite().all()

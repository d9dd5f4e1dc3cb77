"""Training on a handful of experiences: the same every time, groups held out whole, what is missing told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mps_trainer import AuxiliaryTask, Column
from mps_trainer.errors import ExperienceError
from mps_trainer.tasks import wire_columns
from mps_trainer.tasks.preference_classifier import PreferenceClassifier
from mps_trainer.workbench import RecordedExperience, RecordedId, learn
from mps_trainer.workbench.check import learning_warnings
from mps_trainer.workbench.columns_check import check_sources, extract


def batches(num_batches: int = 10, size: int = 32, width: int = 4) -> list[list[RecordedExperience]]:
    rng = np.random.default_rng(0)
    return [
        [
            RecordedExperience(
                eid=RecordedId(batch, i // 8, i % 8),
                tokens=[1, 2, 3],
                reward=float(hidden[0] > hidden[1]),
                info={"hidden_state": hidden},
            )
            for i, hidden in enumerate(rng.standard_normal((size, width)))
        ]
        for batch in range(num_batches)
    ]


def task() -> PreferenceClassifier:
    return PreferenceClassifier(feature_dim=4, hidden_size=16, depth=1, learning_rate=1e-2)


def test_it_learns_the_same_every_time() -> None:
    one, other = (learn(task(), batches(), steps=60, batch_size=64) for _ in range(2))
    assert one.losses == other.losses
    assert one.last_loss < 0.5 * one.first_loss
    assert one.auc is not None
    assert one.auc > 0.9
    assert (one.trained_on, one.held_out, len(one.scores)) == (288, 32, 32)


def test_what_looks_wrong_about_learning_is_said() -> None:
    good = learn(task(), batches(), steps=60, batch_size=64)
    assert learning_warnings(good) == []
    untrained = replace(good, losses=[0.7], auc=0.5, scores=np.full(3, 0.1))
    found = learning_warnings(untrained)
    assert [text[:16] for text in found] == ["the loss does no", "an AUC of 0.50 o", "all scores are e"]


def test_no_group_is_on_both_sides() -> None:
    columns = wire_columns(task())
    extraction = extract(columns, batches(num_batches=3, size=30))
    trained, held = extraction.split()
    groups = extraction.rows["group"]
    assert sorted(trained + held) == list(range(90))
    assert {groups[i] for i in trained} & {groups[i] for i in held} == set()
    assert held
    alone = extract(columns, [batches()[0][:8]])
    assert alone.split() == (list(range(7)), [7]), "one group is all there is"


def test_experiences_that_lack_a_column_are_left_out_and_none_at_all_is_an_error() -> None:
    some = batches(num_batches=2)
    some[0][0].info.clear()
    assert learn(task(), some, steps=1).trained_on == 63 - learn(task(), some, steps=1).held_out
    for experience in (e for batch in some for e in batch):
        experience.info = {"hidden_state": [1.0]}
    with pytest.raises(ExperienceError, match=r"0 of 64 experiences .* has width 1"):
        learn(task(), some, steps=1)


@pytest.mark.parametrize(
    ("source", "todo"),
    [
        ("info.hiden_state", "'info.hidden_state'"),
        ("hidden_state", "'info.hidden_state'"),
        ("respons_tokens", "'response_tokens'"),
        ("group.reward_men", "'group.reward_mean'"),
        ("advantages", "token_level_reward"),
        ("info.x", "there is batch.reward_mean"),
    ],
)
def test_a_misspelt_source_names_the_nearest(source: str, todo: str) -> None:
    column = Column(name="it", source=source)
    with pytest.raises(ExperienceError, match=f"'it' reads {source}") as error:
        check_sources([column], batches(1)[0])
    assert todo in error.value.todo
    [warning] = check_sources([Column(name="it", source=source, required=False)], batches(1)[0])
    assert "always empty" in warning


def test_without_experiences_only_fields_can_be_checked() -> None:
    assert (
        check_sources([Column(name="it", source="info.anything"), Column(name="text", source="response_text")], ())
        == []
    )
    with pytest.raises(ExperienceError, match="no experience has"):
        check_sources([Column(name="it", source="rewad")], ())


def test_a_task_that_draws_numbers_does_not_depend_on_the_caller() -> None:
    torch.manual_seed(1)
    one = learn(task(), batches(), steps=3)
    torch.manual_seed(2)
    assert learn(task(), batches(), steps=3).losses == one.losses
    assert isinstance(one.trainer.task, AuxiliaryTask)

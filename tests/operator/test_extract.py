"""The extraction, on Trinity's own Experience."""

import numpy as np
import pytest
import torch
from trinity.common.experience import EID, Experience

from mps_trainer.columns import IDENTITY_COLUMNS, Column
from mps_trainer.errors import ConfigError
from mps_trainer.operator.extract import Extractor


def experience(task: int = 0, run: int = 0, reward: float | None = 1.0, **info) -> Experience:
    return Experience(
        eid=EID(batch=1, task=task, run=run),
        tokens=torch.arange(10, dtype=torch.int32),
        prompt_length=4,
        logprobs=-torch.ones(6),
        reward=reward,
        info=info,
    )


def test_every_kind_of_column():
    columns = (
        Column(name="response", source="response_tokens", dtype="int32", shape=(None,), maximum=100),
        Column(name="features", source="info.hidden", shape=(3,)),
        Column(name="reward", source="reward"),
        Column(name="eid", source="eid.uid", dtype="text", maximum=100),
    )
    out = Extractor(columns)(
        [experience(hidden=torch.ones(3, dtype=torch.bfloat16)), experience(run=1, hidden=[1, 2, 3])]
    )
    assert out.fed == [0, 1]
    assert [r.tolist() for r in out.rows["response"]] == [[4, 5, 6, 7, 8, 9]] * 2
    assert out.rows["features"][0].dtype == np.float32
    assert out.rows["features"][1].tolist() == [1, 2, 3]
    assert out.rows["reward"].tolist() == [1, 1]
    assert out.rows["eid"][1].startswith("1/0/1/0/")


def test_a_missing_column_leaves_the_experience_out_and_names_what_is_there():
    out = Extractor((Column(name="features", source="info.hidden", shape=(3,)),))(
        [experience(other=1, model_version=2), experience(hidden=[1, 2, 3])]
    )
    assert out.fed == [1]
    assert out.problems == {"features": 1}
    assert "no info.hidden" in out.first_problem
    assert "model_version, other" in out.first_problem


def test_a_wrong_width_names_both_widths_and_the_key():
    out = Extractor((Column(name="features", source="info.hidden", shape=(4,)),))([experience(hidden=[1, 2, 3])])
    assert out.fed == []
    assert "width 3" in out.first_problem
    assert "expects 4" in out.first_problem
    assert "feature_dim" in out.first_problem


def test_an_absent_reward_is_nan_and_not_zero():
    out = Extractor(IDENTITY_COLUMNS)([experience(reward=None)])
    assert out.fed == [0]
    assert np.isnan(out.rows["reward"]).all()


def test_a_long_sequence_is_cut_and_counted():
    out = Extractor((Column(name="t", source="tokens", dtype="int32", shape=(None,), maximum=3),))([experience()])
    assert out.rows["t"][0].tolist() == [0, 1, 2]
    assert out.cut == 1


def test_a_column_may_keep_the_end():
    columns = (
        Column(name="t", source="tokens", dtype="int32", shape=(None,), maximum=3, keep="last"),
        Column(name="all", source="tokens", dtype="int32", shape=(None,), maximum=10, keep="last"),
        Column(name="text", source="info.text", dtype="text", maximum=4, keep="last"),
    )
    out = Extractor(columns)([experience(text="a\u00e9bcd")])
    assert out.rows["t"][0].tolist() == [7, 8, 9]
    assert out.rows["all"][0].tolist() == list(range(10))
    assert out.rows["text"] == ["bcd"], "a character that the cut goes through is left out"
    assert out.cut == 2
    with pytest.raises(ConfigError, match="keep"):
        Column(name="t", source="tokens", shape=(None,), maximum=3, keep="middle")


@pytest.mark.parametrize(("source", "wanted"), [("batch.reward_mean", [2, 2, 2]), ("group.reward_mean", [1.5, 1.5, 3])])
def test_means_look_at_the_whole_batch(source, wanted):
    batch = [experience(0, 0, 1.0), experience(0, 1, 2.0), experience(1, 0, 3.0)]
    assert Extractor((Column(name="b", source=source),))(batch).rows["b"].tolist() == wanted


def test_a_mean_needs_a_reward():
    batch = [experience(reward=None), experience(run=1, reward=2.0)]
    out = Extractor((Column(name="b", source="batch.reward_mean"),))(batch)
    assert out.fed == [1]
    assert out.rows["b"].tolist() == [2.0]


def test_an_unknown_source_is_refused():
    with pytest.raises(ConfigError, match="use a field of the experience"):
        Extractor((Column(name="x", source="inof.hidden"),))


def test_extraction_changes_nothing():
    one = experience(hidden=[1, 2, 3])
    before = Experience.deserialize(one.serialize())
    Extractor((*IDENTITY_COLUMNS, Column(name="features", source="info.hidden", shape=(3,))))([one])
    assert one.serialize() == before.serialize()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_leaves_the_experience_out(bad):
    out = Extractor((Column(name="features", source="info.hidden", shape=(2,)),))(
        [experience(hidden=[1, bad]), experience(hidden=[1, 2])]
    )
    assert out.fed == [1]
    assert "NaN or infinity" in out.first_problem
    assert Extractor(IDENTITY_COLUMNS)([experience(reward=bad)]).fed == []


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (Column(name="x", source="rewrad"), "no attribute 'rewrad'"),
        (Column(name="x", source="info.kind"), "could not convert string"),
        (Column(name="x", source="info.kind", shape=(2,)), "could not convert string"),
    ],
)
def test_what_cannot_be_read_is_named_and_costs_only_that_experience(column, said):
    out = Extractor((column,))([experience(kind="easy")])
    assert out.fed == []
    assert out.problems == {"x": 1}
    assert said in out.first_problem
    assert "What to do" in out.first_problem


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "x", {}, torch.ones(2), 10**400])
@pytest.mark.parametrize("source", ["batch.reward_mean", "group.reward_mean"])
def test_one_bad_reward_costs_one_experience(source, bad):
    batch = [experience(reward=1.0), experience(run=1, reward=3.0), experience(run=2, reward=1.0)]
    batch[2].reward = bad
    out = Extractor((Column(name="baseline", source=source), Column(name="outcome", source="reward")))(batch)
    assert out.fed == [0, 1]
    assert out.rows["baseline"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("eid", [None, "a string"])
def test_an_experience_without_an_id_is_left_out(eid):
    batch = [experience(reward=1.0), experience(run=1, reward=3.0)]
    batch[1].eid = eid
    out = Extractor((*IDENTITY_COLUMNS, Column(name="baseline", source="group.reward_mean")))(batch)
    assert out.fed == [0]
    assert "without an id" in out.first_problem

import numpy as np
import pytest
import torch
from trinity.common.experience import Experience

from mps_trainer.config import FilterSettings, RewardSettings
from mps_trainer.operator.use_scores import correct_rewards, select

NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "settings", "kept"),
    [
        ([1, 9, 2, 8], {"drop": "quantile", "value": 0.5}, [0, 2]),
        ([1, 9, 2, 8], {"drop": "quantile", "value": 0.24}, [0, 1, 2, 3]),
        ([1, 9, 2, 8], {"drop": "threshold", "value": 8}, [0, 2, 3]),
        ([1, 9, NAN, 8], {"drop": "threshold", "value": 0}, [2]),
        ([5, 5, 5, 5], {"drop": "quantile", "value": 0.5}, [2, 3]),
        ([9, 9, 9], {"drop": "threshold", "value": 1}, [2]),
        ([9, 8, 7], {"drop": "threshold", "value": 1, "keep_at_least": 2}, [1, 2]),
        ([9, 8, 7], {"drop": "threshold", "value": 1, "keep_at_least": 0}, []),
        ([9], {"drop": "threshold", "value": 1, "keep_at_least": 5}, [0]),
        ([], {"drop": "quantile", "value": 0.5}, []),
        (range(100), {"drop": "quantile", "value": 0.29}, list(range(71))),
        ([1, 9, 2, 8], {"drop": "top_k", "value": 1}, [0, 2, 3]),
        ([1, 9, NAN, 8], {"drop": "top_k", "value": 9}, [2]),
        ([1, 2], {"drop": "top_k", "value": 9}, [0]),
        ([-1, -3], {"drop": "threshold", "value": -2}, [1]),
    ],
)
def test_select(scores, settings, kept):
    selection = select(np.array(scores, dtype=np.float32), FilterSettings(**settings))
    assert np.flatnonzero(selection.keep).tolist() == kept
    assert selection.num_dropped == len(scores) - len(kept)
    assert np.isnan(selection.limit) == (selection.num_dropped == 0)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"drop": "top_k", "value": 1}, [1, 2, 3, 5]),
        ({"drop": "quantile", "value": 0.5}, [1, 2, 3, 5]),
        ({"drop": "threshold", "value": 0}, [1, 2, 5]),
        ({"drop": "threshold", "value": 0, "keep_at_least": 0}, [5]),
        ({"drop": "threshold", "value": 0, "keep_at_least": 2}, [0, 1, 2, 3, 5]),
    ],
)
def test_each_task_for_itself(settings, kept):
    scores = np.array([9, 1, 2, 3, 4, NAN], dtype=np.float32)
    selection = select(scores, FilterSettings(per="group", **settings), ["a", "a", "b", "c", "c", "c"])
    assert np.flatnonzero(selection.keep).tolist() == kept


@pytest.mark.parametrize(("raw", "wanted"), [(2.0, 1.0), (-2.0, -1.0), (0.0, 0.5)])
def test_clip_brings_the_corrected_reward_into_the_range(raw, wanted):
    batch = [Experience(tokens=torch.arange(4), reward=raw)]
    correct_rewards(batch, np.array([1.0]), RewardSettings(how="add", weight=0.5, clip=(-1, 1)))
    assert batch[0].reward == wanted
    assert batch[0].info["raw_reward"] == raw


@pytest.mark.parametrize(("how", "wanted"), [("add", 2.25), ("multiply", 2.5), ("replace", 0.25)])
def test_correct_rewards(how, wanted):
    batch = [Experience(tokens=torch.arange(4), reward=2.0) for _ in range(2)]
    changed = correct_rewards(batch, np.array([0.5, NAN]), RewardSettings(how=how, weight=0.5))
    assert changed == 1
    assert batch[0].reward == wanted
    assert batch[0].info["raw_reward"] == 2.0
    assert batch[1].reward == 2.0
    assert "raw_reward" not in batch[1].info


def test_an_absent_reward_stays_absent_unless_replaced():
    batch = [Experience(tokens=torch.arange(4), reward=None)]
    assert correct_rewards(batch, np.array([1.0]), RewardSettings(how="add", weight=1)) == 0
    assert batch[0].reward is None
    assert correct_rewards(batch, np.array([1.0]), RewardSettings(how="replace", weight=2)) == 1
    assert batch[0].reward == 2.0

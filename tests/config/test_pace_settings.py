"""Settings of the pace."""

import pytest

from mps_trainer.config import Settings, load_settings
from mps_trainer.config.pace import is_paced
from mps_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("pace", "mps", "paced"), [("auto", "on", True), ("auto", "off", False), ("on", "off", True), ("off", "on", False)]
)
def test_who_is_paced(pace, mps, paced):
    assert is_paced(pace, mps) is paced


def test_without_a_word_there_is_no_pace():
    settings = load_settings({})
    assert not is_paced(settings.pace, "on")
    assert load_settings(settings.dump()) == settings, "the run file holds every setting"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"pace": "auto", "min_steps_per_batch": 9}, ["min_steps_per_batch is 9", "steps_per_batch 4"]),
        ({"max_rollout_slowdown": 0.01}, ["max_rollout_slowdown goes with pace: on or auto", "pace is off"]),
        ({"pace": False, "min_steps_per_batch": 3}, ["min_steps_per_batch goes with pace"]),
        # More than a sidecar could count to.
        ({"pace": "on", "pace_tuning": {"owed_batches": 10**19}}, ["pace_tuning.owed_batches", "1000000"]),
        ({"pace_tuning": {"margin": 0.5}}, ["pace_tuning goes with pace: on or auto"]),
        (
            {"pace": "on", "min_steps_per_batch": 3, "schedule": {"train": "continuous"}},
            ["min_steps_per_batch is 3", "train: continuous", "remove it"],
        ),
        (
            {"pace": "on", "pace_tuning": {"shortest_window": 2, "longest_window": 0.1}},
            ["shortest_window is 2 and longest_window 0.1"],
        ),
        ({"pace": "on", "pace_tuning": {"fixed": 0.1, "presumed": 0.9}}, ["presumed is 0.9, but fixed 0.1"]),
    ],
)
def test_contradictions_say_what_to_do(args, said):
    with pytest.raises(ConfigError) as error:
        load_settings(args)
    for part in said:
        assert part in str(error.value)


def test_what_goes_together():
    load_settings({"pace": "auto", "min_steps_per_batch": 3, "schedule": {"train": "epochs"}})
    load_settings({"pace": "on", "schedule": {"train": "continuous"}})
    load_settings({"pace": "on", "pace_tuning": {"fixed": 0.1}})
    assert Settings(steps_per_batch=0, pace="on").min_steps_per_batch == 1

import pytest

from mps_trainer.config import load_settings
from mps_trainer.errors import ConfigError

GOOD = [
    {"steps_per_batch": 8, "schedule": {"train_every": 3}},
    {"schedule": {"train": "epochs", "epochs": 2, "train_every": 2}},
    {"schedule": {"train": "continuous", "max_replays": 4, "rate_warmup": 10}},
    {"replay": {"sampling": "recency", "half_life": 100, "class_balance": True}, "replay_bytes": "1GiB"},
    {"replay": {"sampling": "priority", "priority_exponent": 0.7, "importance_exponent": 1}},
    {"schedule": {"rate": "cosine", "rate_steps": 100, "rate_warmup": 10, "rate_end": 0}},
]


@pytest.mark.parametrize("args", GOOD)
def test_what_goes_together(args):
    settings = load_settings(args)
    assert load_settings(settings.dump()) == settings, "the run file holds every setting"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"replay": {"half_life": 3}}, ["replay.half_life goes with sampling: recency", "remove half_life"]),
        (
            {"replay": {"sampling": "recency", "priority_exponent": 1}},
            ["replay.priority_exponent goes with"],
        ),
        ({"replay": {"importance_exponent": 1}}, ["replay.importance_exponent", "sampling: priority"]),
        ({"replay": {"smapling": "recency"}}, ["unknown key 'replay.smapling'", "did you mean 'sampling'?"]),
        ({"replay_bytes": "0GiB"}, ["replay_bytes:"]),
        ({"replay_capacity": 10}, ["min_experiences is 32 and replay_capacity 10", "never start"]),
        ({"schedule": {"epochs": 2}}, ["schedule.epochs goes with train: epochs"]),
        ({"schedule": {"max_replays": 2}}, ["schedule.max_replays goes with train: continuous"]),
        ({"schedule": {"train": "continuous", "train_every": 2}}, ["schedule.train_every goes with train: steps"]),
        ({"schedule": {"train": "continuous"}, "steps_per_batch": 9}, ["steps_per_batch is 9", "schedule.max_replays"]),
        ({"schedule": {"train": "epochs"}, "steps_per_batch": 9}, ["steps_per_batch is 9", "schedule.epochs says"]),
        ({"schedule": {"train": "epochs"}, "replay": {"sampling": "recency"}}, ["takes each new experience once"]),
        ({"schedule": {"train": "epochs"}, "replay": {"class_balance": True}}, ["takes each new experience once"]),
        ({"schedule": {"rate": "cosine"}}, ["there is no rate_steps"]),
        ({"schedule": {"rate_steps": 100}}, ["schedule.rate_steps goes with rate: linear or cosine"]),
        ({"schedule": {"rate": "linear", "rate_steps": 9, "rate_warmup": 9}}, ["no step to decay in"]),
    ],
)
def test_contradictions_say_what_to_do(args, said):
    with pytest.raises(ConfigError) as error:
        load_settings(args)
    for part in said:
        assert part in str(error.value)

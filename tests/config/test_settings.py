import json

import pytest

from mps_trainer.config import Settings, load_settings, parse_duration, parse_size
from mps_trainer.errors import ConfigError


def test_units():
    settings = load_settings(
        {"memory": "1.5GiB", "score_timeout": "250ms", "ring_slot": "1MiB", "idle_timeout": "10min"}
    )
    assert settings.memory == 3 * 2**29
    assert settings.score_timeout == 0.25
    assert settings.ring_slot == 2**20
    assert settings.idle_timeout == 600


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"memroy": "8GiB"}, ["unknown key 'memroy'", "did you mean 'memory'?"]),
        ({"filter": {"valu": 1}}, ["unknown key 'filter.valu'", "did you mean 'value'?"]),
        ({"zzz": 1}, ["unknown key 'zzz'", "valid keys are"]),
        ({"use": "fliter"}, ["use:", "'feed', 'filter' or 'reward'", "'fliter'"]),
        ({"memory": "8 apples"}, ["memory:", "8GiB"]),
        ({"score_timeout": "soon"}, ["score_timeout:", "50ms"]),
        ({"memory": "1GiB", "memory_fraction": 0.1}, ["keep one of them"]),
        ({"filter": {"drop": "quantile", "value": 2}}, ["a quantile is a share from 0 to below 1"]),
        ({"device": "gpu"}, ["device:"]),
        ({"max_staleness": "1s"}, ["max_staleness goes with use: filter or reward, but use is feed"]),
        ({"score_where": "operator"}, ["score_where goes with use: filter or reward"]),
        ({"use": "filter", "snapshot_every": "2s"}, ["snapshot_every goes with score_where: operator"]),
        ({"memory": 0}, ["memory:", "greater than 0"]),
        ({"memory": "0GiB"}, ["memory:", "greater than 0"]),
        ({"run_dir": ""}, ["run_dir is ''", "leave it out"]),
        ({"run_dir": " "}, ["run_dir is ' '"]),
        ({"batch_size": 0}, ["batch_size:"]),
        ({"reward": {"weight": float("nan")}}, ["reward.weight:", "finite"]),
        ({"reward": {"weight": float("inf")}}, ["reward.weight:", "finite"]),
        ({"filter": {"drop": "threshold", "value": float("inf")}}, ["filter.value:", "finite"]),
    ],
)
def test_bad_settings_say_what_to_do(args, said):
    with pytest.raises(ConfigError) as error:
        load_settings(args)
    for part in [*said, "What to do"]:
        assert part in str(error.value)


@pytest.mark.parametrize(("written", "meant"), [(True, "on"), (False, "off"), ("auto", "auto"), ("off", "off")])
def test_yaml_1_1_reads_off_as_a_boolean(written, meant):
    assert load_settings({"mps": written}).mps == meant


def test_the_dump_can_be_loaded_again(tmp_path):
    settings = load_settings({"memory": "1GiB", "filter": {"value": 0.2}})
    assert load_settings(json.loads(json.dumps(settings.dump()))) == settings


def test_every_setting_is_described():
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("value", [True, None, "", "-1s", "1 day", []])
def test_no_duration(value):
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(value)


@pytest.mark.parametrize("value", [True, None, "", "-1GiB", "1 zb", []])
def test_no_size(value):
    with pytest.raises(ValueError, match="no size"):
        parse_size(value)


@pytest.mark.parametrize("written", ["0.05ms", "1e-9", 5e-05, "30s"])
def test_what_is_saved_can_be_loaded_again(written):
    if written == "1e-9":
        written = 1e-9
    settings = load_settings({"block_timeout": written})
    assert load_settings(settings.dump()) == settings


@pytest.mark.parametrize(
    "args", [{"ready_timeout": "9999999999999999s"}, {"seed": 10**26}, {"cpu_threads": 100000}, {"batch_size": 10**20}]
)
def test_absurd_numbers_are_refused_before_anything_starts(args):
    with pytest.raises(ConfigError, match=next(iter(args))):
        load_settings(args)

"""Settings as people read them."""

from __future__ import annotations

from mps_trainer.config import Settings, show_setting
from mps_trainer.config.shown import SIZES


def test_every_size_is_known_and_shown_with_its_unit() -> None:
    assert set(SIZES) == {"memory", "replay_bytes", "ring_slot"}
    assert show_setting("replay_bytes", 4 * 2**30) == "4.0 GiB"
    assert show_setting("ring_slot", Settings().ring_slot) == "11.0 MiB"


def test_other_values_are_json_and_words_stay_words() -> None:
    assert show_setting("memory", None) == "null"
    assert show_setting("use", "filter") == "filter"
    assert show_setting("enabled", True) == "true"
    assert show_setting("memory", "odd") == "odd"

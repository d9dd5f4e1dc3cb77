"""Settings: the operator's `args` as one typed, frozen object."""

from mps_trainer.config.schedule import ReplaySettings, ScheduleSettings
from mps_trainer.config.settings import FilterSettings, RewardSettings, Settings, load_settings
from mps_trainer.config.shown import show_setting
from mps_trainer.config.units import format_size, parse_duration, parse_size

__all__ = [
    "FilterSettings",
    "ReplaySettings",
    "RewardSettings",
    "ScheduleSettings",
    "Settings",
    "format_size",
    "load_settings",
    "parse_duration",
    "parse_size",
    "show_setting",
]

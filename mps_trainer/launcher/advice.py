"""What is allowed and will not do what the user wants: said with the plan, and refused by nobody."""

from __future__ import annotations

from mps_trainer.config import Settings
from mps_trainer.launcher.trinity_config import TrinityConfig


def advise(config: TrinityConfig) -> tuple[str, ...]:
    """One line for each trap that the file leads into."""
    settings = config.settings
    if not settings.enabled:
        return ()
    found = (_trainer_waits(config), _nothing_to_drop(config), _one_score_per_task(settings), _unused_section(settings))
    return tuple(f"warning: {line}" for line in found if line)


def _trainer_waits(config: TrinityConfig) -> str:
    """Trinity's trainer waits for a full batch, and a filter leaves it short (seen with trinity-rft 0.6)."""
    settings = config.settings
    drops = settings.use == "filter" or (settings.use == "reward" and settings.on_late == "drop")
    if config.mode != "both" or not drops or config.batch_size is None:
        return ""
    fed = config.batch_size * (config.repeat_times or 1)
    wanted = config.train_batch_size or fed
    if wanted < fed:
        return ""
    return (
        f"in mode: both Trinity's trainer waits for {wanted} experiences a step (buffer.train_batch_size), the "
        f"explorer makes {fed}, and the filter leaves fewer: the run would stop and end in a TimeoutError. Set "
        "buffer.train_batch_size to what the filter leaves at least"
    )


def _nothing_to_drop(config: TrinityConfig) -> str:
    settings = config.settings
    rule, size = settings.filter, config.repeat_times
    if settings.use != "filter" or rule.per != "group" or rule.drop != "quantile" or not size:
        return ""
    if rule.num_in_share(size):
        return ""
    return (
        f"filter: a share of {rule.value:g} of the {size} runs of a task is less than one, so nothing will be dropped; "
        f"use at least {1 / size:.3g}, drop: top_k, or per: batch"
    )


def _one_score_per_task(settings: Settings) -> str:
    if settings.use != "filter" or settings.task != "pass_rate" or settings.filter.per != "group":
        return ""
    return "pass_rate gives all runs of a task one score: with per: group their order decides; use per: batch"


def _unused_section(settings: Settings) -> str:
    for section, use in (("filter", "filter"), ("reward", "reward")):
        if section in settings.model_fields_set and settings.use != use:
            return f"the section {section}: does nothing with use: {settings.use}"
    return ""

"""What a reader of a run's report should know first: sentences, most important first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mps_trainer.report.series import Line, read_object

if TYPE_CHECKING:
    from mps_trainer.report.summary import RunReport

_OVER = ("stopped", "failed")
_CHANCE = 0.6
_MOST_LATE = 0.05


def read_settings(run_dir: Path) -> dict[str, Any]:
    """The resolved settings of the run; {} when there are none to read."""
    return read_object(run_dir / "settings.json")


def why_nothing_was_dropped(settings: Mapping[str, Any], operator: list[Line], steps: int) -> str:
    """The reason why no experience was taken out, a half sentence; "" when nobody knows."""
    use = settings.get("use")
    if use == "feed":
        return "use: feed only trains"
    if not operator:
        return "the operator never wrote a line, so it saw no batch or did not find this run; see Trinity's log"
    if use == "reward":
        return "use: reward corrects rewards and drops nothing"
    if use != "filter":
        return ""
    if all(line.get("score_too_early") for line in operator if line.get("scored")):
        if not any(line.get("scored") for line in operator):
            return "no batch got scores: they were late, or no sidecar was there"
        warmup = settings.get("warmup_steps") or 0
        wait = f" and from batch {warmup + 1} on" if warmup else ""
        return f"scores count from model version {settings.get('min_version')} on{wait}, and the model got to {steps}"
    return _room_of_the_filter(settings.get("filter"))


def _room_of_the_filter(rule: object) -> str:
    if not isinstance(rule, Mapping):
        return ""
    kind, value = rule.get("drop"), rule.get("value")
    if kind == "threshold":
        return f"no score was above filter.value, {value}"
    if kind == "quantile":
        return f"a share of {value} of a batch (per: {rule.get('per')}) is less than one experience"
    return f"filter.drop is {kind} with value {value}, keep_at_least {rule.get('keep_at_least')}"


def remarks(report: RunReport, operator: list[Line], *, alive: bool) -> list[str]:
    """Sentences; none for a run in which all went well."""
    found = [f"{text}." for text in report.missing]
    if alive:
        found.append("The run is still going on: this is what it has done so far.")
    elif report.state not in _OVER:
        found.append(f"The run ended without a word of its own while the sidecar was {report.state}: it was killed.")
    if report.state == "failed":
        found.append(f"The sidecar failed: {report.error}")
    if not report.batches:
        found.append("No batch has reached the sidecar; see sidecar.log, and Trinity's log for what the operator says.")
    elif not report.steps:
        found.append("No training step was taken: min_experiences may be higher than what came in.")
    if report.last_auc is not None and report.last_auc < _CHANCE and report.steps:
        found.append(f"The AUC ends at {report.last_auc:.2f}: the model knows little more than chance.")
    if lost := sum(report.lost.values()):
        found.append(f"{lost:,} experiences found no room in the ring: raise ring_slots, or lower steps_per_batch.")
    late = sum(int(line.get("late") or 0) for line in operator)
    # With `score_where: operator` the sidecar has given none.
    scored = report.scored or sum(int(line.get("scored") or 0) for line in operator)
    if scored and late > _MOST_LATE * (late + scored):
        found.append(f"{late:,} experiences got their scores too late: raise score_timeout, or lower steps_per_batch.")
    if report.restarts:
        times = "once" if report.restarts == 1 else f"{report.restarts} times"
        found.append(f"The sidecar was restarted {times}; before the last: {report.last_death or 'unknown'}")
    if report.set_aside:
        found.append(f"{report.set_aside:,} experiences ended a sidecar and were set aside; see set_aside/.")
    return found

"""A run's numbers as a person reads them: one label and one short text a line."""

from __future__ import annotations

from collections.abc import Sequence

from mps_trainer.report.summary import RunReport

_MOST_VALUES = 14  # of a series in one line
_LOST_BY = {"oldest": "pushed out of a full ring (drop_oldest)", "newest": "refused by a full ring (drop_newest)"}


def describe(report: RunReport) -> list[tuple[str, str]]:
    """(label, text) for each line of the report; a line without a label goes on with the one above it."""
    lines = [
        ("run", f"{report.run_id}, {report.state}, on {report.device}"),
        ("experiences", _experiences(report)),
        ("loss", _course(report.first_loss, report.last_loss, report.losses)),
        ("AUC", _course(report.first_auc, report.last_auc, report.aucs) + _how_auc(report)),
        ("filter", _filter(report)),
        ("lost", _lost(report)),
        ("restarts", f"{report.restarts:,}{f', before the last: {report.last_death}' if report.last_death else ''}"),
    ]
    if report.error:
        first, *rest = report.error.splitlines()
        lines += [("error", first), *(("", line) for line in rest)]
    lines += [("missing" if i == 0 else "", text) for i, text in enumerate(report.missing)]
    lines += [(name, str(path)) for name, path in report.paths.items()]
    return [*lines, ("run folder", str(report.run_dir))]


def _experiences(report: RunReport) -> str:
    parts = []
    if report.seen is not None:
        parts += [f"{report.seen:,} seen", f"{report.fed or 0:,} fed to the sidecar"]
    again = f" ({report.duplicates:,} of them twice)" if report.duplicates else ""
    parts += [
        f"{report.experiences:,} received in {report.batches:,} batches{again}",
        f"{report.scored:,} scored",
        f"{report.trained:,} drawn for training in {report.steps:,} steps",
    ]
    return ", ".join(parts)


def _course(first: float | None, last: float | None, values: Sequence[float]) -> str:
    if first is None or last is None:
        return "none"
    shown = f"   [{' '.join(f'{value:.2f}' for value in _thin_out(values))}]" if values else ""
    return f"{first:.3f} first, {last:.3f} last{shown}"


def _how_auc(report: RunReport) -> str:
    return "" if report.first_auc is None else " (each batch before training on it)"


def _thin_out(values: Sequence[float]) -> list[float]:
    """At most `_MOST_VALUES` of them at even distances, the first and the last included."""
    if len(values) <= _MOST_VALUES:
        return list(values)
    return [values[round(i * (len(values) - 1) / (_MOST_VALUES - 1))] for i in range(_MOST_VALUES)]


def _filter(report: RunReport) -> str:
    if not report.knows_drops:
        return "not known: operator.jsonl cannot be read"
    if not report.dropped:
        return f"dropped nothing: {report.why_none}" if report.why_none else "dropped nothing"
    rules = ", ".join(f"{rule}: {count:,}" for rule, count in report.drop_reasons.items())
    of = "" if report.seen is None else f" of {report.seen:,}, {report.kept or 0:,} passed on"
    return f"dropped {report.dropped:,}{of} ({rules})"


def _lost(report: RunReport) -> str:
    lost = [f"{count:,} {_LOST_BY.get(policy, policy)}" for policy, count in report.lost.items() if count]
    told = f"{', '.join(lost)}; the sidecar never saw them" if lost else "nothing on the way to the sidecar"
    return told + (f"; {report.set_aside:,} set aside because they ended a sidecar" if report.set_aside else "")

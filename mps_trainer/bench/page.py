"""The results for people and for programs: a Markdown page and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mps_trainer.bench.arms import find_arm

Row = Mapping[str, Any]
# Several narrow tables for each load: a terminal of 100 columns shows each line whole.
_TABLES = (
    ("arm", "rollout kept", "tokens/s", "batch, s"),
    ("arm", "ms per token, p50", "ms per token, p99"),
    ("arm", "trainer steps/s", "of dedicated", "experiences per 1 % lost"),
    ("arm", "score ms, p50 / p99", "memory, engine / trainer", "CPU, engine / trainer / feed"),
)
_MOST_IDLE = 0.005
# A median of some batches is better than their range; beyond this it says nothing about half a percent.
_RESOLVED = 0.01
_HOW = """\
Medians over rounds (min..max). `rollout kept`: the solo rollout's time to the last token of its batches over this
arm's, of the same round. `of dedicated`: training steps per second of the whole window, gaps included, over those of
the trainer of `{alone}` without a rollout. `experiences per 1 % lost`: experiences trained per second for each percent
of the rollout that is lost; "-" where no loss can be told from none. CPU: seconds used per second. Every arm's trainer
is fed without a pause, so these are its limits and not what a run needs. Scores wait for the training that is under
way and, in the ring, for the record before them; in `cpu-in-operator` that wait is the batch's own and not in them."""


def page(results: Mapping[str, Any], picture: str = "") -> str:
    """The Markdown page; `picture`: a file beside it to show."""
    lines = ["# Rollout against auxiliary training", "", f"`{results['command']}`", ""]
    lines += [f"{name}: {value}  " for name, value in results["machine"].items()]
    lines += [f"Load average at start and end: {results['load_average'][0]}, {results['load_average'][1]}.", ""]
    lines += [f"> {note}" for note in results["notes"]] + [""] * bool(results["notes"])
    if picture:
        lines += [f"![rollout kept against trainer speed]({picture})", ""]
    for session in results["sessions"]:
        lines += _session(session)
    if results["left_out"]:
        lines += ["## Left out", "", "| arm | why |", "|---|---|"]
        lines += [f"| {name} | {why} |" for name, why in results["left_out"].items()] + [""]
    lines += ["## The arms", "", "| arm | what it is |", "|---|---|"]
    ran = dict.fromkeys(row["arm"] for session in results["sessions"] for row in session["rows"])
    lines += [f"| {name} | {find_arm(name).what} |" for name in ran]
    return "\n".join(lines) + "\n"


def _session(session: Mapping[str, Any]) -> list[str]:
    rows: Sequence[Row] = session["rows"]
    lines = [f"## Task {session['task']}", "", f"{session['rounds']} rounds, interleaved, of {session['asked']} asked."]
    if session["cut"]:
        lines.append(f"Cut: {session['cut']}.")
    rates = [w["steps"] / w["seconds"] for w in session["alone"]]
    if rates:
        middle = sorted(rates)[len(rates) // 2]
        lines.append(f"The trainer alone: {middle:.3g} steps/s ({min(rates):.3g}..{max(rates):.3g}).")
    lines += ["", _HOW.format(alone=session["dedicated"]), ""]
    for load in dict.fromkeys(row["load"] for row in rows):
        found = [_cells(row) for row in rows if row["load"] == load]
        lines += [f"### {load}", ""]
        for head in _TABLES:
            lines += [*_table(head, found), ""]
    lines += _outputs(rows)
    lines += ["What processes at rest cost the rollout (batches one after the other, not interleaved):", ""]
    lines += ["| until | cost | under 0.5 % | batch with, s | without, s |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['idle until']} | {100 * row['cost']:+.2f} % | {_verdict(row)} "
        f"| {_spread(row['with'])} | {_spread(row['without'])} |"
        for row in session["idle"]
    ]
    return [*lines, ""]


def _verdict(row: Row) -> str:
    doubt = max((row[side]["max"] - row[side]["min"]) / 2 / row[side]["median"] for side in ("with", "without"))
    if doubt > _RESOLVED:
        return f"not resolved: equal batches differ by +-{100 * doubt:.1f} %"
    return "yes" if row["cost"] < _MOST_IDLE else "no"


def _outputs(rows: Sequence[Row]) -> list[str]:
    wrong = [row for row in rows if not row["outputs"]["right"]]
    compared = sum(row["outputs"]["compared"] for row in rows)
    if not wrong:
        return [f"Outputs right in every window: {compared} batches compared with the solo rollout's tokens.", ""]
    return [f"**Outputs wrong** in {row['arm']}, {row['load']}: {json.dumps(row['outputs'])}" for row in wrong] + [""]


def _table(head: Sequence[str], found: Sequence[Mapping[str, str]]) -> list[str]:
    """A Markdown table that is straight in plain text too."""
    table = [dict(zip(head, head, strict=True)), *found]
    widths = {name: max(len(cells[name]) for cells in table) for name in head}
    lines = [f"| {' | '.join(cells[name].ljust(widths[name]) for name in head)} |" for cells in table]
    return [lines[0], f"|{'|'.join('-' * (widths[name] + 2) for name in head)}|", *lines[1:]]


def _cells(row: Row) -> dict[str, str]:
    memory, cpu = row["memory_bytes"], row["cpu_per_s"]
    kind = "gpu" if memory["engine"]["gpu"] else "resident"
    trains = row["steps_per_s"] is not None
    trainer_memory = _gib(memory["trainer"][_trainer_kind(memory)]) if trains else "-"
    scores = "-" if row["score_ms_p50"] is None else f"{row['score_ms_p50']:.1f} / {row['score_ms_p99']:.1f}"
    per_percent = row["experiences_per_percent"]
    return {
        "arm": row["arm"],
        "rollout kept": _spread(row["rollout_kept"], 3),
        "tokens/s": _spread(row["tokens_per_s"], 0),
        "batch, s": _spread(row["batch_s"], 2),
        "ms per token, p50": _spread(row["token_ms_p50"], 2),
        "ms per token, p99": _spread(row["token_ms_p99"], 2),
        "trainer steps/s": _spread(row["steps_per_s"], 2),
        "of dedicated": _spread(row["of_dedicated"], 3),
        "experiences per 1 % lost": "-" if per_percent is None else f"{per_percent:,.0f}",
        "score ms, p50 / p99": scores,
        "memory, engine / trainer": f"{_gib(memory['engine'][kind])} / {trainer_memory}",
        "CPU, engine / trainer / feed": f"{cpu['engine']:.2f} / {cpu['trainer']:.2f} / {cpu['feed']:.2f}",
    }


def _trainer_kind(memory: Mapping[str, Any]) -> str:
    return "gpu" if memory["trainer"]["gpu"] else "resident"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _spread(value: Mapping[str, float] | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value['median']:,.{digits}f} ({value['min']:,.{digits}f}..{value['max']:,.{digits}f})"

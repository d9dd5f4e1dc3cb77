"""One self-contained HTML page of a run: no network, no script, light or dark as the reader's system is, printable."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import mps_trainer
from mps_trainer.config import Settings, show_setting
from mps_trainer.report.chart_parts import Chart, Data
from mps_trainer.report.charts import draw_charts
from mps_trainer.report.history import History, read_history
from mps_trainer.report.remarks import read_settings, remarks
from mps_trainer.report.series import Line, batch_lines, is_number, operator_lines, read_object
from mps_trainer.report.style import STYLE
from mps_trainer.report.summary import RunReport, rule_of, summarize
from mps_trainer.run import is_run_alive
from mps_trainer.run.private_files import write_private

_EXAMPLES = 5
# Of the launcher's, and a matter of where and not of what.
_NO_SETTINGS = ("run_file", "run_host")


def write_page(run_dir: Path, page: Path) -> Path:
    """Write the page of a run into `page` (0600: it names experiences); its path.

    Raises:
        RunError: the folder is no run folder. ConfigError: matplotlib is missing. OSError: the disk refuses.
    """
    report = summarize(run_dir)
    batches, operator, history = batch_lines(run_dir), operator_lines(run_dir), read_history(run_dir)
    settings = read_settings(run_dir)
    memory = settings.get("memory")
    data = Data(batches, operator, history, memory if isinstance(memory, int) else None)
    sections = [
        _head(report, batches, history, settings),
        _remarks(remarks(report, operator, alive=is_run_alive(report.run_id))),
        _tiles(report),
        _charts(draw_charts(data) if batches or operator else []),
        _dropped(report, operator),
        _events(history),
        _settings(settings),
        _machine(read_object(run_dir / "machine.json")),
        _files(report),
    ]
    body = "\n".join(sections)
    parts = {"title": f"Run {escape(report.run_id)}", "style": STYLE, "body": body, "version": mps_trainer.__version__}
    page.parent.mkdir(parents=True, exist_ok=True)
    write_private(page, _FRAME.format(**parts))
    return page


_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<footer>mps-trainer {version}</footer>
</body>
</html>
"""


def _head(report: RunReport, batches: list[Line], history: History, settings: Mapping[str, Any]) -> str:
    times = [life.started for life in history.lives] + [line["t"] for line in batches if "t" in line]
    times += [life.ended for life in history.lives if life.ended is not None]
    when = ""
    if times:
        begin, end = min(times), max(times)
        when = f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(begin))}, {_duration(end - begin)}; "
    task = f"task {settings['task']}, use: {settings['use']}; " if {"task", "use"} <= settings.keys() else ""
    return (
        f'<header><h1>Run <code>{escape(report.run_id)}</code> <span class="state {escape(report.state)}">'
        f"{escape(report.state)}</span></h1><p>{escape(f'{when}{task}device {report.device}')}</p></header>"
    )


def _remarks(found: list[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    return f'<ul class="remarks">{items}</ul>' if found else ""


def _tiles(report: RunReport) -> str:
    tiles = [
        ("experiences", f"{report.experiences:,}", f"in {report.batches:,} batches"),
        ("training steps", f"{report.steps:,}", f"{report.trained:,} draws"),
        ("loss", _number(report.last_loss), f"first {_number(report.first_loss)}"),
        ("AUC", _number(report.last_auc), f"first {_number(report.first_auc)}"),
        (
            "taken out",
            f"{report.dropped:,}" if report.knows_drops else "-",
            "of an unknown number" if report.seen is None else f"of {report.seen:,} seen",
        ),
        ("lost", f"{sum(report.lost.values()):,}", "ring full"),
        ("restarts", f"{report.restarts:,}", f"{report.set_aside:,} experiences set aside"),
    ]
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for label, value, more in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _charts(charts: list[Chart]) -> str:
    if not charts:
        return '<p class="nothing">There is nothing to draw: no batch has been taken.</p>'
    return f'<div class="charts">{"".join(map(_chart, charts))}</div>'


def _chart(chart: Chart) -> str:
    picture = chart.svg or f'<p class="nothing">{escape(chart.nothing)}</p>'
    label = f'role="img" aria-label="{escape(chart.title)}"'
    picture = picture.replace("<svg ", f"<svg {label} ", 1)
    caption = f"<p>{escape(chart.caption)}</p>" if chart.caption and chart.svg else ""
    wide = ' class="wide"' if chart.wide else ""
    return f"<figure{wide}><figcaption><h2>{escape(chart.title)}</h2>{caption}</figcaption>{picture}</figure>"


def _dropped(report: RunReport, operator: list[Line]) -> str:
    if not report.knows_drops:
        return "<section><h2>What the operator took out</h2><p>Not known.</p></section>"
    if not report.dropped:
        why = f": {report.why_none}" if report.why_none else ""
        return f"<section><h2>What the operator took out</h2><p>Nothing{escape(why)}.</p></section>"
    by_rule: dict[str, list[Line]] = defaultdict(list)
    for line in operator:
        for drop in line.get("dropped") or []:
            by_rule[rule_of(str(drop.get("why", "")))].append(drop)
    rows = []
    for rule, drops in sorted(by_rule.items(), key=lambda item: -len(item[1])):
        for i, drop in enumerate(sorted(drops, key=_score, reverse=True)[:_EXAMPLES]):
            first = f"<td>{escape(rule)}</td><td>{len(drops):,}</td>" if i == 0 else "<td></td><td></td>"
            rows.append(f"<tr>{first}{_example(drop)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("reason", "count", "experience", "score", "reward", "info"))
    return (
        f"<section><h2>What the operator took out</h2><p>The {_EXAMPLES} with the highest scores for each reason; all "
        f"of them are in <code>operator.jsonl</code>.</p>{_table(head, rows)}</section>"
    )


def _score(drop: Line) -> float:
    score: Any = drop.get("score")
    return float(score) if is_number(score) else float("-inf")


def _example(drop: Line) -> str:
    info = drop.get("info")
    told = ", ".join(f"{key} {value}" for key, value in info.items()) if isinstance(info, dict) else ""
    cells = (str(drop.get("eid", "")), _number(drop.get("score")), _number(drop.get("reward")), told)
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _events(history: History) -> str:
    if not history.events:
        return ""
    rows = [
        f"<tr><td>{time.strftime('%H:%M:%S', time.localtime(event.when))}</td><td>{escape(event.text)}</td></tr>"
        for event in history.events
    ]
    return f"<section><h2>Events</h2>{_table('<th>time</th><th>what</th>', rows)}</section>"


def _settings(settings: Mapping[str, Any]) -> str:
    if not settings:
        return "<section><h2>Settings</h2><p>Not recorded: there is no settings.json.</p></section>"
    defaults = Settings().dump()
    changed: list[str] = []
    usual: list[str] = []
    for key, value in settings.items():
        if key in _NO_SETTINGS:
            continue
        row = f"<tr><td><code>{escape(key)}</code></td><td>{escape(show_setting(key, value))}</td></tr>"
        (usual if key in defaults and value == defaults[key] else changed).append(row)
    head = "<th>setting</th><th>value</th>"
    different = _table(head, changed) if changed else "<p>All are the defaults.</p>"
    rest = f"<details><summary>{len(usual)} at their defaults</summary>{_table(head, usual)}</details>"
    return f"<section><h2>Settings</h2>{different}{rest}</section>"


def _machine(machine: Mapping[str, Any]) -> str:
    if not machine:
        return "<section><h2>Machine</h2><p>Not recorded.</p></section>"
    rows = []
    for key, value in machine.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        rows.append(f"<tr><td>{escape(str(key))}</td><td>{escape(text)}</td></tr>")
    return f"<section><h2>Machine</h2>{_table('<th>what</th><th>found</th>', rows)}</section>"


def _files(report: RunReport) -> str:
    rows = [
        f"<tr><td>{escape(name)}</td><td><code>{escape(str(path))}</code></td></tr>"
        for name, path in report.paths.items()
    ]
    return f"<section><h2>Files</h2>{_table('<th>what</th><th>where</th>', rows)}</section>"


def _table(head: str, rows: Iterable[str]) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _number(value: Any) -> str:
    return f"{value:.3f}" if is_number(value) else "-"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"

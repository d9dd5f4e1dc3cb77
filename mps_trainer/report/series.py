"""Reading a run folder's JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Every whole line; [] when there is no file. A line that a killed process left half written is skipped."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:  # noqa: PERF203
            continue
    return lines


def batch_lines(run_dir: Path) -> list[Line]:
    """The batches of metrics.jsonl in order, each once: those that a successor told again replace the first telling."""
    batches: list[Line] = []
    for line in read_lines(run_dir / "metrics.jsonl"):
        if line.get("kind") == "resume":
            batches = [batch for batch in batches if batch["batch"] <= line["batch"]]
        elif line.get("kind") == "batch":
            batches.append(line)
    return batches


def operator_lines(run_dir: Path) -> list[Line]:
    """What the operators wrote, in order of time."""
    return sorted(read_lines(run_dir / "operator.jsonl"), key=lambda line: float(line.get("t", 0)))


def column(lines: list[Line], name: str) -> list[float]:
    """One value a line, NaN where there is none."""
    return [float("nan") if line.get(name) is None else float(line[name]) for line in lines]

"""Reading a run folder's JSON lines.

A run that was killed, a full disk or an editor can leave anything there. What cannot be used is left out, so that the
rest can be looked at: a line that is no JSON object, and in a line a value that is not of its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mps_trainer.run.quantiles import QUANTILES
from mps_trainer.run.tail import parse_line

Line = dict[str, Any]

_TOLD_BY = {
    "metrics.jsonl": "the course of loss, AUC and scores, the backlog and pauses",
    "operator.jsonl": "what the operator saw and took out, its rewards and waits for scores",
    "supervisor.log": "the lives of the sidecar and their events",
    "settings.json": "the settings",
    "machine.json": "the machine and its packages",
}


def read_lines(path: Path) -> list[Line]:
    """Every whole line that is a JSON object; [] when there is no file, or it cannot be read (`what_is_missing`)."""
    try:
        # Only the newline ends a line: a text may hold what else `splitlines` takes for an end.
        texts = path.read_text(errors="replace").split("\n")
    except OSError:
        return []
    return [line for line in map(parse_line, texts) if isinstance(line, dict)]


def what_is_missing(run_dir: Path) -> list[str]:
    """A sentence for each file of a report that is there and cannot be read."""
    reasons = {name: _why_unreadable(run_dir / name) for name in _TOLD_BY}
    return [
        f"{name} cannot be read ({why}), so {_TOLD_BY[name]} are missing here" for name, why in reasons.items() if why
    ]


def read_object(path: Path) -> Line:
    """The JSON object in a file; {} when it is none, or cannot be read."""
    try:
        found = parse_line(path.read_text(errors="replace"))
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}


def batch_lines(run_dir: Path) -> list[Line]:
    """The batches of metrics.jsonl in order, each once: those that a successor told again replace the first telling.

    What a line has of these is of this type: scores a list of five, dropped an object of whole numbers, and finite
    numbers under the other names of `_NUMBERS`. Each line has a batch.
    """
    batches: list[Line] = []
    for line in (_keep(line, _OF_BATCH) for line in read_lines(run_dir / "metrics.jsonl")):
        if "batch" not in line:
            continue
        if line.get("kind") == "resume":
            batches = [batch for batch in batches if batch["batch"] <= line["batch"]]
        elif line.get("kind") == "batch":
            batches.append(line)
    return batches


def operator_lines(run_dir: Path) -> list[Line]:
    """What the operators wrote, in order of time.

    What a line has of these is of this type: seen and fed whole numbers, dropped a list of objects, rewards and
    rewards_kept lists of five, and finite numbers under the other names of `_OPERATOR_NUMBERS`.
    """
    lines = [_keep(line, _OF_OPERATOR) for line in read_lines(run_dir / "operator.jsonl")]
    return sorted(lines, key=lambda line: float(line.get("t", 0)))


def column(lines: list[Line], name: str) -> list[float]:
    """One value a line, NaN where there is none."""
    return [float("nan") if line.get(name) is None else float(line[name]) for line in lines]


def _why_unreadable(path: Path) -> str:
    try:
        path.open("rb").close()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _keep(line: Line, checks: Mapping[str, Callable[[Any], bool]]) -> Line:
    return {name: value for name, value in line.items() if name not in checks or checks[name](value)}


def _is_whole(value: Any) -> bool:
    # JSON sets no limit to a whole number, but a larger one is no float.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold."""
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_quantiles(value: Any) -> bool:
    return isinstance(value, list) and len(value) == len(QUANTILES) and all(map(is_number, value))


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_drops(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(drop, dict) for drop in value)


_NUMBERS = (
    "t", "loss", "auc", "auc_window", "backlog", "backlog_age_s", "memory_bytes", "gpu_memory_bytes", "score_ms",
    "step_ms", "learning_rate",
)  # fmt: skip
_OPERATOR_NUMBERS = (
    "t", "score_wait_ms", "score_latency_ms", "score_age_s", "late", "scored", "score_too_early", "filter_limit",
    "reward_mean", "reward_mean_kept",
)  # fmt: skip
_OF_BATCH = {
    **dict.fromkeys(_NUMBERS, is_number),
    **dict.fromkeys(("step", "batch"), _is_count),
    "scores": _is_quantiles,
    "dropped": _is_counts,
}
_OF_OPERATOR = {
    **dict.fromkeys(_OPERATOR_NUMBERS, is_number),
    **dict.fromkeys(("seen", "fed"), _is_count),
    **dict.fromkeys(("rewards", "rewards_kept"), _is_quantiles),
    "dropped": _is_drops,
}

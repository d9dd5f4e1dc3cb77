"""The numbers of a run."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mps_trainer.errors import RunError
from mps_trainer.report.remarks import read_settings, why_nothing_was_dropped
from mps_trainer.report.series import Line, batch_lines, operator_lines, what_is_missing
from mps_trainer.run import Status


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What a run did. A number is None where the run has none.

    Attributes:
        state, device, restarts, set_aside, last_death, error: of the sidecar, from status.json.
        seen, fed, kept: experiences that the operator saw, sent to the sidecar, and passed on.
        experiences, duplicates, batches: what the sidecar received.
        steps, trained: training steps, and experiences drawn for them.
        scored: experiences that were given a score.
        dropped, drop_reasons: experiences that `use: filter` removed, and how many for each rule.
        why_none: why nothing was dropped, a half sentence; "" when something was, or nobody knows.
        lost: experiences that never reached the sidecar, by the back-pressure policy that dropped them.
        first_loss, last_loss: the mean loss of the first and of the last batch that was trained on.
        first_auc, last_auc: of the first batch, and over the last 1,024 experiences or so; before training on them.
        losses, aucs: of every batch that has one, in order.
        missing: what cannot be told, because its file cannot be read; a sentence each.
        paths: what there is to look at, by name.
    """

    run_dir: Path
    run_id: str
    state: str
    device: str
    restarts: int
    set_aside: int
    last_death: str
    error: str
    seen: int | None
    fed: int | None
    kept: int | None
    experiences: int
    duplicates: int
    batches: int
    steps: int
    trained: int
    scored: int
    dropped: int
    drop_reasons: dict[str, int]
    why_none: str
    lost: dict[str, int]
    first_loss: float | None
    last_loss: float | None
    first_auc: float | None
    last_auc: float | None
    losses: list[float]
    aucs: list[float]
    missing: list[str]
    paths: dict[str, Path]

    @property
    def knows_drops(self) -> bool:
        """Whether what the operator took out can be read at all."""
        return not any(text.startswith("operator.jsonl ") for text in self.missing)


def summarize(run_dir: Path) -> RunReport:
    """Read status.json, metrics.jsonl and operator.jsonl; of the last two what can be read (`missing`).

    Raises:
        RunError: the folder is no run folder.
    """
    if not run_dir.is_dir():
        raise RunError(f"there is no folder {run_dir}", "give the run folder, <name>.mps-trainer/<run id>")
    status = Status.load(run_dir)
    batches, operator = batch_lines(run_dir), operator_lines(run_dir)
    losses, aucs = _known(batches, "loss"), _known(batches, "auc")
    drops = [drop for line in operator for drop in line.get("dropped") or []]
    seen = _total(operator, "seen")
    missing = what_is_missing(run_dir)
    return RunReport(
        run_dir=run_dir,
        run_id=status.run_id,
        state=status.state.value,
        device=status.device,
        restarts=status.restarts,
        set_aside=status.set_aside,
        last_death=status.last_death,
        error=status.error,
        seen=seen,
        fed=_total(operator, "fed"),
        kept=None if seen is None else seen - len(drops),
        experiences=status.experiences,
        duplicates=status.duplicates,
        batches=status.batches,
        steps=status.version,
        trained=status.trained,
        scored=status.scored,
        dropped=len(drops),
        drop_reasons=dict(Counter(rule_of(str(drop.get("why", ""))) for drop in drops)),
        why_none="" if drops else why_nothing_was_dropped(read_settings(run_dir), operator, status.version),
        lost=_lost(batches, status),
        first_loss=losses[0] if losses else status.first_loss,
        last_loss=losses[-1] if losses else status.loss,
        first_auc=next(iter(aucs), status.first_auc),
        last_auc=next(reversed(_known(batches, "auc_window")), status.auc),
        losses=losses,
        aucs=aucs,
        missing=missing,
        paths=_paths(run_dir),
    )


def _lost(batches: list[Line], status: Status) -> dict[str, int]:
    # The status goes on after the last batch; it is all there is where metrics.jsonl cannot be read.
    told: dict[str, int] = dict(batches[-1].get("dropped") or {}) if batches else {}
    for policy, count in (("oldest", status.lost_oldest), ("newest", status.lost_newest)):
        if count > told.get(policy, 0):
            told[policy] = count
    return told


def _known(lines: list[Line], name: str) -> list[float]:
    return [float(line[name]) for line in lines if line.get(name) is not None]


def _total(lines: list[Line], name: str) -> int | None:
    values: list[Any] = [line[name] for line in lines if name in line]
    return sum(values) if values else None


def rule_of(why: str) -> str:
    """What stands for a reason among others: "quantile 0.1" of "quantile 0.1: among the highest"."""
    return re.split(r":\s", why)[0] or "no reason given"


def _paths(run_dir: Path) -> dict[str, Path]:
    found = {
        name: run_dir / file
        for name, file in {
            "metrics": "metrics.jsonl",
            "status": "status.json",
            "operator": "operator.jsonl",
            "settings": "settings.json",
            "tensorboard": "tensorboard",
            "sidecar log": "sidecar.log",
            "set aside": "set_aside",
        }.items()
    }
    steps = {path.name.removeprefix("step-"): path for path in (run_dir / "checkpoints").glob("step-*")}
    # Somebody may have put a copy beside them: step-80.bak is none of ours.
    numbers = [name for name in steps if name.isdecimal()]
    if numbers:
        found["checkpoint"] = steps[max(numbers, key=int)]
    return {name: path for name, path in found.items() if path.exists()}

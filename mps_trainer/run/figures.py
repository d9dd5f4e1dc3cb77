"""The figures of a run at one moment, for those who watch it: `status`, `status --watch`, Prometheus.

consumes   status.json, members.json, the ends of metrics.jsonl and operator.jsonl; nothing of the sidecar itself
produces   `Figures`; a look costs under a millisecond, the first one some tens, and more where operator.jsonl is long
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mps_trainer.run.members import Member, load_members
from mps_trainer.run.operator_totals import OperatorTotals
from mps_trainer.run.status import Status
from mps_trainer.run.tail import Line, Tail, number_in

#: Seconds that a rate is taken over.
RATE_S = 30.0
_MOST_POINTS = 512
_MOST_WAITS = 256


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One look at a run. A number is None where there is nothing to say.

    Attributes:
        status: the sidecar's last word; None before its first.
        steps_per_s, experiences_per_s: over the last `RATE_S` seconds.
        losses, aucs: of the last batches, oldest first; the AUC before training on the batch.
        seen, removed, late: experiences that the operators saw, took out (filter, late), got no score for in time; over
            all operators that the run has had.
        lost: experiences that never reached a sidecar, as the operators count: a sidecar's own count ends with it.
        score_wait_ms_p50, score_wait_ms_p99: of the last batches, from the request to the scores, as the operator saw;
            the sidecar's where the operator has told nothing yet.
        score_age_s: how long ago the model that gave the last scores had been trained last.
        members: engines on the sidecar's GPU.
    """

    status: Status | None
    steps_per_s: float | None = None
    experiences_per_s: float | None = None
    losses: list[float] = field(default_factory=list)
    aucs: list[float] = field(default_factory=list)
    seen: int | None = None
    removed: int | None = None
    late: int | None = None
    lost: int | None = None
    score_wait_ms_p50: float | None = None
    score_wait_ms_p99: float | None = None
    score_age_s: float | None = None
    members: list[Member] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the status is left out, which has a place of its own."""
        return {name: value for name, value in asdict(self).items() if name != "status"}


class Watcher:
    """Looks at one run folder again and again.

    Args:
        spare: where the status of a live run stands while its folder refuses it.
    """

    def __init__(self, run_dir: Path, spare: Path | None = None) -> None:
        self.run_dir = run_dir
        self._spare = spare
        self._metrics = Tail(run_dir / "metrics.jsonl")
        self._operator = Tail(run_dir / "operator.jsonl")
        self._status: Status | None = None
        self._points: deque[tuple[float, float, float]] = deque(maxlen=_MOST_POINTS)
        self._losses: deque[float] = deque(maxlen=_MOST_POINTS)
        self._aucs: deque[float] = deque(maxlen=_MOST_POINTS)
        self._waits: deque[float] = deque(maxlen=_MOST_WAITS)
        self._totals = OperatorTotals(run_dir / "operator.jsonl")

    def look(self) -> Figures:
        """Read what is new. Between two lives of a sidecar the last known figures stay."""
        self._status = Status.peek(self.run_dir, self._spare) or self._status
        for line in self._metrics.read():
            self._take(line)
        for line in self._operator.read():
            waits_ms = (number_in(line, name) for name in ("score_latency_ms", "score_wait_ms"))
            self._waits.extend([ms for ms in waits_ms if ms is not None][:1])
        self._totals.read()
        status, waits, totals = self._status, sorted(self._waits), self._totals
        own = _scores_of(status)
        return Figures(
            status=status,
            steps_per_s=self._rate(1),
            experiences_per_s=self._rate(2),
            losses=list(self._losses),
            aucs=list(self._aucs),
            seen=totals.total("seen_total"),
            removed=totals.total("removed_total"),
            late=totals.total("late_total"),
            lost=totals.total("lost_here_total"),
            score_wait_ms_p50=_quantile(waits, 0.5) if waits else own.get("p50"),
            score_wait_ms_p99=_quantile(waits, 0.99) if waits else own.get("p99"),
            score_age_s=own.get("age"),
            members=load_members(self.run_dir),
        )

    def _take(self, line: Line) -> None:
        when, step, experiences = (number_in(line, name) for name in ("t", "step", "experiences"))
        if line.get("kind") != "batch" or when is None or step is None or experiences is None:
            return
        self._points.append((when, step, experiences))
        for name, series in (("loss", self._losses), ("auc", self._aucs)):
            if (value := number_in(line, name)) is not None:
                series.append(value)

    def _rate(self, column: int) -> float | None:
        status = self._status
        if status is None:
            return None
        points = [*self._points, (status.updated, float(status.version), float(status.experiences))]
        now = time.time()
        since = now - RATE_S
        # The last point before the window, or the first one there is.
        before = [point for point in points if point[0] <= since]
        first = (since, *before[-1][1:]) if before else points[0]
        seconds = now - first[0]
        # After a resume the steps go on from the checkpoint, below where they were.
        return max(0.0, points[-1][column] - first[column]) / seconds if seconds > 1 else None


def _scores_of(status: Status | None) -> dict[str, float]:
    """What the sidecar itself says of its scores, where it does."""
    if status is None:
        return {}
    found = {"age": status.score_age_s, "p50": status.score_latency_ms_p50, "p99": status.score_latency_ms_p99}
    return {key: float(value) for key, value in found.items() if value is not None}


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None

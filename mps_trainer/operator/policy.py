"""From the scores of a batch to what Trinity gets: when scores count, what a late one means, what goes and why."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from mps_trainer.columns import Array
from mps_trainer.config import Settings
from mps_trainer.operator.feeder import Exchange
from mps_trainer.operator.late_scores import LastScores
from mps_trainer.operator.staleness import Staleness, ages_s
from mps_trainer.operator.use_scores import correct_rewards, select

Metrics = dict[str, int | float]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What one batch became.

    Attributes:
        kept: the experiences to go on with, in their order.
        dropped: (index in the batch, score, why), the score NaN for one that was late.
        metrics: plain ints and floats.
    """

    kept: list[Any]
    dropped: list[tuple[int, float, str]]
    metrics: Metrics


class ScorePolicy:
    """Applies `use` with everything around it. Keeps the last scores; call it from one thread, batch by batch."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._last = LastScores()
        self._staleness = Staleness(settings.max_staleness)
        self._num_batches = 0
        self._num_late = 0
        self._num_seen = 0
        self._num_removed = 0
        self._version = -1

    def apply(self, experiences: list[Any], exchange: Exchange) -> Outcome:
        """Filter the batch or correct its rewards in place; without scores that count it goes on as it came."""
        outcome = self._use(experiences, exchange)
        self._num_seen += len(experiences)
        self._num_removed += len(outcome.dropped)
        outcome.metrics.update(seen_total=self._num_seen, removed_total=self._num_removed)
        return outcome

    def _use(self, experiences: list[Any], exchange: Exchange) -> Outcome:
        self._num_batches += 1
        self._num_late += int(exchange.late.sum())
        metrics: Metrics = {"fed": 0, "sidecar_up": 0, **exchange.metrics}
        if self._settings.use == "feed":
            return Outcome(experiences, [], metrics)
        now_ns = time.monotonic_ns()
        metrics |= {"late": int(exchange.late.sum()), "late_total": self._num_late, **_describe(exchange, now_ns)}
        scores, gone, stale_metrics = self._without_stale(exchange, now_ns)
        metrics |= stale_metrics
        if self._too_early(exchange):
            return Outcome(experiences, [], metrics | ({"score_too_early": 1} if exchange.version >= 0 else {}))
        if self._settings.on_late == "last":
            scores = self._fill_from_last(experiences, scores, gone, exchange.trained_ns, now_ns, metrics)
        if self._settings.use == "reward":
            metrics["rewards_corrected"] = correct_rewards(experiences, scores, self._settings.reward)
            return self._drop(experiences, scores, {}, gone, metrics)
        return self._filter(experiences, scores, gone, metrics)

    def _without_stale(self, exchange: Exchange, now_ns: int) -> tuple[Array, dict[int, str], Metrics]:
        """The scores that are young enough; index and reason of each experience without one that should have one."""
        trained_ns = np.full(len(exchange.scores), exchange.trained_ns, np.int64)
        stale = self._staleness.find(exchange.scores, trained_ns, now_ns)
        late = f"no score within {self._settings.score_timeout:g} s"
        gone = {int(i): late for i in np.flatnonzero(exchange.late)}
        if stale.any():
            gone |= dict.fromkeys(map(int, np.flatnonzero(stale)), self._staleness.why(exchange.age_s(now_ns)))
        return np.where(stale, np.nan, exchange.scores), gone, self._staleness.count(stale)

    def _fill_from_last(
        self,
        experiences: list[Any],
        scores: Array,
        gone: dict[int, str],
        trained_ns: int,
        now_ns: int,
        metrics: Metrics,
    ) -> Array:
        """Scores with those that are late or too old replaced by the last known, as far as those are young enough."""
        eids = [str(experience.eid.uid) for experience in experiences]
        filled, last_trained_ns = self._last.fill(eids, scores, with_mean=self._settings.use == "reward")
        self._last.remember(eids, scores, trained_ns)
        # Only what is late is filled: an experience that could not be fed was never meant to have a score.
        wanted = np.zeros(len(scores), dtype=bool)
        wanted[list(gone)] = True
        used = wanted & ~np.isnan(filled) & ~self._staleness.find(filled, last_trained_ns, now_ns)
        metrics["late_from_last"] = int(used.sum())
        if used.any():
            metrics["last_score_age_s"] = float(ages_s(last_trained_ns[used], now_ns).max())
        result: Array = np.where(used, filled, scores)
        return result

    def _too_early(self, exchange: Exchange) -> bool:
        # A late answer names no version. Before the first one nothing is known of the model, and nothing is dropped.
        self._version = max(self._version, exchange.version)
        return self._num_batches <= self._settings.warmup_steps or self._version < self._settings.min_version

    def _filter(self, experiences: list[Any], scores: Array, gone: dict[int, str], metrics: Metrics) -> Outcome:
        settings = self._settings.filter
        groups = [getattr(e.eid, "tid", "") for e in experiences] if settings.per == "group" else None
        selection = select(scores, settings, groups)
        if selection.num_dropped:
            metrics["filter_limit"] = selection.limit
        why = f"{settings.drop} {settings.value:g}" + (" of its task" if groups else "")
        # By number and by share the limit differs from task to task; the score itself stands beside the reason.
        why += ": score > the limit" if settings.drop == "threshold" else ": among the highest"
        going = dict.fromkeys(map(int, np.flatnonzero(~selection.keep)), why)
        metrics["filtered"] = len(going)
        if len(going) == len(experiences) > 0:
            logger.warning("mps_trainer: the filter (%s) dropped all %d experiences of a batch", why, len(going))
        return self._drop(experiences, scores, going, gone, metrics)

    def _drop(
        self, experiences: list[Any], scores: Array, going: dict[int, str], gone: dict[int, str], metrics: Metrics
    ) -> Outcome:
        """Add what `on_late: drop` takes, and never empty a batch unless told so."""
        if self._settings.on_late == "drop":
            late = [i for i in sorted(gone) if i not in going]
            room = len(experiences) - len(going) - self._settings.filter.keep_at_least
            late = late[: max(0, room)]
            going |= {i: gone[i] for i in late}
            metrics["late_dropped"] = len(late)
        kept = [experience for i, experience in enumerate(experiences) if i not in going]
        return Outcome(kept, [(i, float(scores[i]), why) for i, why in sorted(going.items())], metrics)


def _describe(exchange: Exchange, now_ns: int) -> Metrics:
    known = exchange.scores[~np.isnan(exchange.scores)]
    if len(known) == 0:
        return {}
    return {
        "scored": len(known),
        "model_version": exchange.version,
        "score_age_s": exchange.age_s(now_ns),
        "score_mean": float(known.mean()),
        "score_max": float(known.max()),
    }

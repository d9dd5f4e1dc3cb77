"""The line of metrics.jsonl that tells of one batch, collected while the batch is scored and trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mps_trainer.columns import Array
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.metrics import MetricsLog, quantiles

_STEPS_PER_LINE = 50


class BatchReport:
    """Collects, and writes a `step` line every so many steps and a `batch` line at the end."""

    def __init__(self, metrics: MetricsLog, learner: Learner) -> None:
        self._metrics = metrics
        self._learner = learner
        self._forget()

    def scored(self, scores: Array, ms: float, latency_ms: float, age_s: float) -> None:
        """A part of the batch was scored; its latency, and the age of its scores, see `answering`."""
        self._scores.append(scores)
        self._score_ms += ms
        self._waits.append((latency_ms, age_s))

    def stepped(self, loss: float, ms: float) -> None:
        """One training step was taken."""
        self._losses.append(loss)
        self._train_ms += ms
        if len(self._losses) % _STEPS_PER_LINE == 0 and (self._learner.steps_due or self._learner.may_train):
            self._metrics.write("step", {"step": self._learner.trainer.step, "loss": loss})

    def paused(self, reason: str) -> None:
        """Somebody else computes on the GPU, or with "" no longer."""
        values = {"step": self._learner.trainer.step, "paused": int(bool(reason)), "reason": reason}
        self._metrics.write("pause", values)

    def write(self, auc: float | None, gauges: Mapping[str, Any]) -> None:
        """End the batch with its line.

        Args:
            auc: on this batch, before its steps.
            gauges: as `Picture.gauges`, after its steps.
        """
        counters, losses = self._learner.counters, self._losses
        self._metrics.write(
            "batch",
            {
                "step": self._learner.trainer.step,
                "batch": counters.batches,
                "loss": sum(losses) / len(losses) if losses else None,
                "learning_rate": self._learner.trainer.learning_rate,
                "auc": auc,
                "auc_window": counters.auc,
                "experiences": counters.experiences,
                "duplicates": counters.duplicates,
                "trained": counters.trained,
                "replay_size": len(self._learner.replay),
                "score_ms": round(self._score_ms, 3),
                "score_latency_ms": _highest(latency_ms for latency_ms, _ in self._waits),
                "score_age_s": _highest(age_s for _, age_s in self._waits),
                "step_ms": round(self._train_ms / len(losses), 3) if losses else None,
                "scores": quantiles(self._scores),
                **gauges,
                "task": self._learner.trainer.metrics(),
            },
        )
        self._forget()

    def _forget(self) -> None:
        self._scores: list[Array] = []
        self._losses: list[float] = []
        self._score_ms = self._train_ms = 0.0
        self._waits: list[tuple[float, float]] = []


def _highest(values: Iterable[float]) -> float | None:
    return round(max(found), 3) if (found := list(values)) else None

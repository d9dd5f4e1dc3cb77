"""What the sidecar says of itself, as metrics for Trinity's monitor: docs/watching.md has the list."""

from __future__ import annotations

from mps_trainer.run import State, Status


def figures_of(status: Status) -> dict[str, int | float]:
    """Plain ints and floats, the only types that survive Trinity's filter; a number that does not exist is left out."""
    optional = {
        "loss": status.loss,
        "auc": status.auc,
        # `score_age_s` is that of the scores of the batch itself.
        "sidecar_score_age_s": status.score_age_s,
        "score_latency_ms_p50": status.score_latency_ms_p50,
        "score_latency_ms_p99": status.score_latency_ms_p99,
    }
    return {
        "sidecar_restarts": status.restarts,
        "sidecar_failed": int(status.state is State.FAILED),
        "sidecar_paused": int(status.state is State.PAUSED),
        "sidecar_version": status.version,
        "sidecar_experiences": status.experiences,
        "sidecar_memory_bytes": status.memory_bytes,
        "backlog": status.backlog,
        "backlog_age_s": float(status.backlog_age_s),
        "lost_total": status.lost_oldest + status.lost_newest,
        "set_aside_total": status.set_aside,
        **{name: float(value) for name, value in optional.items() if value is not None},
    }

"""Requests for scores: answered, and measured for `status.json` and metrics.jsonl.

The latency of a score begins when the operator sends the record that asks for it, and ends when the reply is there for
the operator to take. Its age begins when the model took its last training step.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from mps_trainer.run import Status
from mps_trainer.sidecar.batch_report import BatchReport
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.publishing import Snapshots
from mps_trainer.transport import Delivery

#: Replies that the quantiles of the latency are taken over.
_WINDOW = 512


class Answering:
    """Scores records for operators; where they read snapshots, nobody asks."""

    def __init__(self, learner: Learner, report: BatchReport, snapshots: Snapshots) -> None:
        self._learner = learner
        self._report = report
        self._snapshots = snapshots
        self._latencies_ms: deque[float] = deque(maxlen=_WINDOW)

    def answer(self, delivery: Delivery) -> None:
        """Score a record with the model as it is, and reply."""
        begin = time.monotonic_ns()
        trainer = self._learner.trainer
        scores = trainer.score(delivery.batch)
        delivery.reply(scores, trainer.step, trainer.trained_ns)
        now = time.monotonic_ns()
        self._learner.counters.scored += delivery.header.num_rows
        latency_ms = (now - delivery.header.sent_ns) / 1e6
        self._latencies_ms.append(latency_ms)
        self._report.scored(scores, (now - begin) / 1e6, latency_ms, (now - trainer.trained_ns) / 1e9)

    def describe(self, status: Status) -> None:
        """Write age and latency into `status`; None for what this life has none of yet."""
        # Told even when there is none: the status begins as a copy of a predecessor's.
        status.score_latency_ms_p50 = status.score_latency_ms_p99 = status.score_age_s = None
        if self._latencies_ms:
            p50, p99 = np.quantile(np.array(self._latencies_ms), (0.5, 0.99)).tolist()
            status.score_latency_ms_p50, status.score_latency_ms_p99 = round(p50, 3), round(p99, 3)
        trained_ns = self._learner.trainer.trained_ns if self._latencies_ms else 0
        trained_ns = trained_ns or self._snapshots.trained_ns
        if trained_ns:
            status.score_age_s = round(max(0, time.monotonic_ns() - trained_ns) / 1e9, 3)

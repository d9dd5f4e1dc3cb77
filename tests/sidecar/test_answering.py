"""Ages and latencies as the sidecar tells them, and the age of weights that a successor took over."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from real_sidecar import SMALL_TASK, token_rows

from mps_trainer.columns import PackedBatch
from mps_trainer.config import load_settings
from mps_trainer.run import RunRecord, Status
from mps_trainer.sidecar.answering import Answering
from mps_trainer.sidecar.batch_report import BatchReport
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.metrics import MetricsLog
from mps_trainer.sidecar.own_files import OwnFiles
from mps_trainer.sidecar.phases import Phases
from mps_trainer.sidecar.publishing import Snapshots
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.startup import Learning, Prepared, build_learning
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.worst_case import worst_case_batch
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import RecordHeader, decode_batch, encode_batch
from mps_trainer.transport.record import KIND_BATCH

SETTINGS = load_settings({**SMALL_TASK, "batch_size": 16})
TASK = load_task(SETTINGS.task, SETTINGS.task_args)
COLUMNS = wire_columns(TASK)


def batch(size: int) -> PackedBatch:
    return decode_batch(encode_batch(token_rows(np.random.default_rng(0), size), COLUMNS), COLUMNS)


class Request:
    """A delivery, sent `latency_s` ago, that keeps its reply."""

    def __init__(self, packed: PackedBatch, latency_s: float) -> None:
        sent_ns = time.monotonic_ns() - int(latency_s * 1e9)
        self.header = RecordHeader(KIND_BATCH, 1, 0, 1, num_rows=packed.num_rows, want_scores=True, sent_ns=sent_ns)
        self.batch = packed
        self.replied: tuple[Any, ...] = ()

    def reply(self, *values: Any) -> bool:
        self.replied = values
        return True


def test_a_reply_names_when_its_model_was_trained_and_is_measured(tmp_path: Path) -> None:
    trainer = Trainer(TASK, 16, 0)
    learner = Learner(trainer, ReplayBuffer(COLUMNS, 64, 0), SETTINGS)
    status = Status(run_id="r")
    metrics = MetricsLog(OwnFiles(status, tmp_path))
    report = BatchReport(metrics, learner)
    answering = Answering(learner, report, Snapshots())
    answering.describe(status)
    assert status.score_age_s is status.score_latency_ms_p50 is status.score_latency_ms_p99 is None
    status = Status(run_id="r", score_age_s=9.0, score_latency_ms_p50=1.0, score_latency_ms_p99=2.0)
    answering.describe(status)
    found = (status.score_age_s, status.score_latency_ms_p50, status.score_latency_ms_p99)
    assert found == (None, None, None), "a predecessor's"
    before = trainer.trained_ns
    trainer.train_step(batch(16))
    assert trainer.trained_ns > before
    for latency_s in (1.0, 3.0):
        request = Request(batch(20), latency_s)
        answering.answer(request)  # type: ignore[arg-type]
        scores, version, trained_ns = request.replied
        assert scores.shape == (20,)
        assert (version, trained_ns) == (1, trainer.trained_ns)
    trainer.trained_ns -= int(100e9)
    answering.describe(status)
    assert status.score_latency_ms_p50 is not None
    assert 1000 < status.score_latency_ms_p50 < status.score_latency_ms_p99
    assert status.score_age_s >= 100
    assert learner.counters.scored == 40
    report.write(None, {})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["score_latency_ms"] >= 3000
    assert line["score_age_s"] >= 0
    metrics.close()


def build(folder: Path) -> Learning:
    record = RunRecord(
        run_id="r", config="", derived_config="", run_dir=str(folder), ray_namespace="", settings=SETTINGS.dump()
    )
    prepared = Prepared(TASK, COLUMNS, worst_case_batch(COLUMNS, 16))
    return build_learning(record, SETTINGS, prepared, None, Phases(time.monotonic()))


def test_the_weights_of_a_checkpoint_are_as_old_as_they_are(tmp_path: Path) -> None:
    first = build(tmp_path)
    trainer = first.learner.trainer
    trainer.train_step(batch(16))
    trainer.trained_ns -= int(50e9)
    first.save()
    second = build(tmp_path).learner.trainer
    assert second.step == 1
    assert abs(second.trained_ns - trainer.trained_ns) < 40e9
    [path] = tmp_path.glob("checkpoints/step-1/state.json")
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "trained": time.time() + 1000}))
    now = time.monotonic_ns()
    assert build(tmp_path).learner.trainer.trained_ns >= now, "a clock that was set back makes no weights of the future"
    del state["trained"]
    path.write_text(json.dumps(state))
    assert build(tmp_path).learner.trainer.trained_ns >= now, "a checkpoint of an older version says nothing"

"""The sidecar process: what it does from its start to its end. One thread.

    run file -> lock -> threads, device -> task, dry step -> checkpoint + journal -> hub -> READY
                                                                                       |
    consumes     records of all operators' channels       .----------------------------'
    produces     scores, status.json, metrics.jsonl       v
                 checkpoints, journal                   loop   wait for the doorbell (limited) -> records, oldest first:
    waits for    the doorbell                             |      score and reply, if asked | evaluate | journal |
    unblocked by an operator's send, a signal,            |      replay buffer | release | steps | metrics | checkpoint
                 its time limit                           |
                                                          `--> drain: rings emptied, steps taken, checkpoint, STOPPED

Scores come first and are given by the model as it is, which has not seen these experiences: that makes them an
honest test too. The loop ends for a signal, for the supervisor's death and when no operator lives (`ending.py`).
"""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import time
from contextlib import ExitStack
from pathlib import Path

from mps_trainer.columns import Array
from mps_trainer.config import Settings, load_settings
from mps_trainer.errors import (
    AlreadyRunningError,
    ConfigError,
    CorruptRecordError,
    MpsTrainerError,
    PlacementError,
    RunError,
    TaskError,
)
from mps_trainer.run import RunPaths, RunRecord, State, Status, try_hold
from mps_trainer.run.exit_codes import BAD_CONFIG, CRASHED, OK, TASK_FAILED
from mps_trainer.sidecar.ending import Ending
from mps_trainer.sidecar.learner import RecordName
from mps_trainer.sidecar.metrics import MetricsLog, quantiles
from mps_trainer.sidecar.ready import ReadyPipe
from mps_trainer.sidecar.startup import Learning, build_learning, replay_journal, settle_device
from mps_trainer.transport import Delivery, SidecarHub

_log = logging.getLogger(__name__)
_WAIT_S = 0.25
_STATUS_S = 2.0
_STEPS_PER_LINE = 50
_MAX_JOURNAL_BYTES = 512 * 2**20


def run(run_file: Path, ready_descriptor: int) -> int:
    """The whole life of a sidecar; its exit code (`run.exit_codes`)."""
    faulthandler.enable()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    ready = ReadyPipe(ready_descriptor)
    try:
        record = RunRecord.load(run_file)
        settings = load_settings(record.settings)
    except (RunError, ConfigError) as error:
        _log.error("%s", error)
        ready.failed(error)
        return BAD_CONFIG
    try:
        _serve_run(RunPaths(run_file), record, settings, ready)
    except Exception as error:  # noqa: BLE001  # the process's top level: every end has an exit code and a reason
        _log.exception("the sidecar failed")
        ready.failed(error)
        return _exit_code(error)
    return OK


def _exit_code(error: Exception) -> int:
    if isinstance(error, TaskError):
        return TASK_FAILED
    return BAD_CONFIG if isinstance(error, (ConfigError, PlacementError)) else CRASHED


def _serve_run(paths: RunPaths, record: RunRecord, settings: Settings, ready: ReadyPipe) -> None:
    with ExitStack() as stack:
        lock = try_hold(paths.sidecar_lock, f"sidecar of run {record.run_id}, pid {os.getpid()}")
        if lock is None:
            raise AlreadyRunningError(
                f"another sidecar serves run {record.run_id}", "stop it first: one sidecar serves a run"
            )
        stack.enter_context(lock)
        ending = Ending(paths, settings.idle_timeout, owned=bool(record.owner_lock))
        Path(record.run_dir).mkdir(parents=True, exist_ok=True)
        status = _begin_status(record)
        status.save(Path(record.run_dir))
        try:
            settle_device(record, settings)
            learning = build_learning(record, settings)
            sidecar = Sidecar(record, settings, learning, status, ending)
            stack.callback(sidecar.close)
            try:
                sidecar.serve(ready)
            except TaskError:
                # It is not restarted, so what dead operators left is removed now.
                sidecar.close(unlink=True)
                raise
        except MpsTrainerError as error:
            status.state, status.error = State.FAILED, str(error)
            status.save(Path(record.run_dir))
            raise
        if ending.orphaned:
            # Nobody else is left to do it.
            paths.remove()


def _begin_status(record: RunRecord) -> Status:
    restarts = 0
    if (Path(record.run_dir) / "status.json").exists():
        restarts = Status.load(Path(record.run_dir)).restarts
    return Status(run_id=record.run_id, pid=os.getpid(), device=record.device, restarts=restarts)


class Sidecar:
    """The loop around a `Learning`; see the drawing above."""

    def __init__(
        self, record: RunRecord, settings: Settings, learning: Learning, status: Status, ending: Ending
    ) -> None:
        self._run_dir = Path(record.run_dir)
        self._settings = settings
        self._learning = learning
        self._learner = learning.learner
        self._trainer = learning.learner.trainer
        self._status = status
        self._ending = ending
        self._metrics = MetricsLog(self._run_dir)
        self._hub = SidecarHub(record.run_id, learning.columns)
        ending.wake_with(self._hub.wake)
        self._saved_at_step = self._trainer.step
        self._status_saved = 0.0
        self._scores: list[Array] = []
        self._score_ms = 0.0
        self._gone: dict[str, int] = {}

    def serve(self, ready: ReadyPipe) -> None:
        """Take over what a predecessor left, report READY, work until there is a reason to end, and end in order."""
        self._resume()
        self._set_state(State.READY)
        ready.ready()
        _log.info("ready: step %d, %d experiences", self._trainer.step, len(self._learner.replay))
        self._metrics.open_tensorboard()
        while not self._ending.check():
            self._hub.wait(_WAIT_S)
            self._take_records(limit=64)
            self._look_around()
        _log.info("ending: %s", self._ending.reason)
        self._drain()
        self._set_state(State.STOPPED)
        self._hub.close(unlink=True)

    def close(self, *, unlink: bool = False) -> None:
        """Leave nothing in flight on the device and nothing open; without `unlink` channels stay for a successor."""
        self._trainer.synchronize()
        self._learning.journal.close()
        self._metrics.close()
        self._hub.close(unlink=unlink)

    def _resume(self) -> None:
        self._status.resumed_from = self._learning.resumed_from
        if self._learning.resumed_from is not None or self._status.restarts:
            self._metrics.write("resume", {"step": self._trainer.step, "batch": self._learner.counters.batches})
        replay_journal(self._learning, self._train_due)

    def _take_records(self, limit: int) -> None:
        for _ in range(limit):
            try:
                delivery = self._hub.receive()
            except CorruptRecordError as error:
                _log.warning("skipped a record: %s", error)
                continue
            if delivery is None:
                return
            with delivery:
                self._take(delivery)
            self._train_due()

    def _take(self, delivery: Delivery) -> None:
        header = delivery.header
        if header.want_scores:
            begin = time.monotonic()
            scores = self._trainer.score(delivery.batch)
            delivery.reply(scores, self._trainer.step)
            self._score_ms += (time.monotonic() - begin) * 1e3
            self._scores.append(scores)
            self._learner.counters.scored += header.num_rows
        name = RecordName(header.channel, header.seq, header.request_id, header.part, header.parts, header.sent_ns)
        if self._learner.knows(name):
            return
        self._learner.evaluate(delivery.batch)
        self._learning.journal.append(dataclasses.asdict(name), delivery.payload)
        self._learner.take(name, delivery.batch)

    def _train_due(self) -> None:
        """The steps that are due, then the metrics of the batch, then a checkpoint if it is time."""
        if not self._learner.batch_is_in:
            return
        begin, losses = time.monotonic(), []
        while self._learner.steps_due:
            losses.append(self._learner.train_step())
            if len(losses) % _STEPS_PER_LINE == 0 and self._learner.steps_due:
                self._metrics.write("step", {"step": self._trainer.step, "loss": losses[-1]})
        self._write_batch(losses, (time.monotonic() - begin) * 1e3)
        due = self._trainer.step - self._saved_at_step >= self._settings.checkpoint_every
        if due or self._learning.journal.nbytes > _MAX_JOURNAL_BYTES:
            self._save()

    def _write_batch(self, losses: list[float], train_ms: float) -> None:
        counters, auc = self._learner.counters, self._learner.close_batch()
        producers = self._hub.producers()
        self._metrics.write(
            "batch",
            {
                "step": self._trainer.step,
                "batch": counters.batches,
                "loss": sum(losses) / len(losses) if losses else None,
                "auc": auc,
                "auc_window": counters.auc,
                "experiences": counters.experiences,
                "duplicates": counters.duplicates,
                "trained": counters.trained,
                "replay_size": len(self._learner.replay),
                "score_ms": round(self._score_ms, 3),
                "step_ms": round(train_ms / len(losses), 3) if losses else None,
                "scores": quantiles(self._scores),
                "backlog": sum(producer.backlog for producer in producers),
                "dropped": self._dropped(),
            },
        )
        self._scores, self._score_ms = [], 0.0
        self._save_status()

    def _look_around(self) -> None:
        """Notice operators that live and that died; refresh the status now and then."""
        for producer in self._hub.producers():
            if producer.alive:
                self._ending.operator_seen()
        self._reap()
        if time.monotonic() - self._status_saved > _STATUS_S:
            self._save_status()

    def _reap(self) -> None:
        before = self._dropped()
        if self._hub.reap():
            after = self._dropped()
            for name, count in before.items():
                self._gone[name] = self._gone.get(name, 0) + count - after[name]

    def _dropped(self) -> dict[str, int]:
        """Experiences that never arrived, by the policy that dropped them, over all operators of the run so far."""
        sent = [producer.sent for producer in self._hub.producers()]
        return {
            "oldest": sum(counters.rows_dropped_oldest for counters in sent) + self._gone.get("oldest", 0),
            "newest": sum(counters.rows_dropped_newest for counters in sent) + self._gone.get("newest", 0),
        }

    def _drain(self) -> None:
        self._set_state(State.DRAINING)
        self._hub.find_new()
        # As many as there are now: an operator that goes on sending must not keep us here.
        self._take_records(limit=sum(producer.backlog for producer in self._hub.producers()))
        self._learner.finish_open_batches()
        self._train_due()
        if self._trainer.step != self._saved_at_step or self._learning.journal.nbytes:
            self._save()
        self._reap()

    def _save(self) -> None:
        self._learning.save()
        self._saved_at_step = self._trainer.step

    def _set_state(self, state: State) -> None:
        self._status.state = state
        self._save_status()

    def _save_status(self) -> None:
        for name, value in dataclasses.asdict(self._learner.counters).items():
            setattr(self._status, name, value)
        self._status.version = self._trainer.step
        self._status.replay_size = len(self._learner.replay)
        self._status.memory_bytes = _resident_bytes()
        self._status.save(self._run_dir)
        self._status_saved = time.monotonic()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

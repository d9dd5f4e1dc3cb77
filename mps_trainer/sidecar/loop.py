"""The sidecar's loop. One thread.

    consumes     records of all operators' channels, before them what a predecessor left in the journal
    produces     scores or snapshots of the weights, status.json, metrics.jsonl, checkpoints, journal
    waits for    the doorbell; unblocked by an operator's send, a signal, its time limit

    pause -> nothing is launched: records wait in the rings until the supervisor ends the pause
    READY -> catch up: journal records the checkpoint lacks, one by one
          -> loop: wait for the doorbell -> records, oldest first:
                 score and reply, if asked | evaluate | journal | replay buffer | release | steps | metrics | checkpoint
             no record, and `train: continuous`: one step
          -> drain (`draining.py`): rings emptied into the journal, its records and steps taken within a time limit,
             checkpoint, STOPPED

Scores come first and are given by the model as it is, which has not seen these experiences: that makes them an
honest test too. The loop ends for a signal, for the supervisor's death and when no operator lives (`ending.py`);
it looks after every record and every step. A slot is released only when its record is in the journal: one whose
journaling failed stays in the ring for the successor. On a GPU the release waits for the copy of the record to end.
Before each record and step the file `doing` says what comes; what killed a predecessor is set aside (`set_aside.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from mps_trainer.columns import PackedBatch
from mps_trainer.config import Settings
from mps_trainer.errors import CorruptRecordError
from mps_trainer.run import RunRecord, State
from mps_trainer.run.doing import Stage
from mps_trainer.sidecar.answering import Answering
from mps_trainer.sidecar.batch_report import BatchReport
from mps_trainer.sidecar.draining import Drain
from mps_trainer.sidecar.dropped import Dropped
from mps_trainer.sidecar.ending import Ending
from mps_trainer.sidecar.learner import RecordName
from mps_trainer.sidecar.metrics import MetricsLog
from mps_trainer.sidecar.noting import Note
from mps_trainer.sidecar.own_files import OwnFiles
from mps_trainer.sidecar.pace.named import pace_for
from mps_trainer.sidecar.pause import Pause
from mps_trainer.sidecar.picture import Picture
from mps_trainer.sidecar.publishing import snapshots_for
from mps_trainer.sidecar.ready import ReadyPipe
from mps_trainer.sidecar.run_folder import RunFolder
from mps_trainer.sidecar.saving import Saving
from mps_trainer.sidecar.startup import Learning
from mps_trainer.sidecar.steps import Steps
from mps_trainer.transport import Delivery, SidecarHub, decode_batch

_log = logging.getLogger(__name__)
_WAIT_S = 0.25


class Sidecar:
    """The loop around a `Learning`; see the drawing above."""

    def __init__(
        self, record: RunRecord, settings: Settings, learning: Learning, own: OwnFiles, ending: Ending
    ) -> None:
        self._own = own
        self._learning = learning
        self._journal = learning.journal
        self._learner = learning.learner
        self._trainer = learning.learner.trainer
        self._status = own.status
        self._ending = ending
        self._pause = Pause(record)
        self._metrics = MetricsLog(own)
        self._report = BatchReport(self._metrics, self._learner)
        self._snapshots = snapshots_for(settings, self._trainer, record.run_id)
        self._answering = Answering(self._learner, self._report, self._snapshots)
        self._note = Note(own.run_dir, settings.batch_size)
        self._saving = Saving(learning, own, self._note, settings.checkpoint_every)
        self._folder = RunFolder(own, self._journal, self._metrics, self._note, self._saving.save)
        self._learner.on_step = lambda batch: self._note.step(batch, self._trainer.step)
        self._trainer.on_part = self._note.beat
        self._aside = learning.aside
        self._ring = learning.ring
        on_attach = self._ring.attach if self._ring is not None else None
        self._hub = SidecarHub(record.run_id, learning.columns, on_attach=on_attach)
        self._dropped = Dropped(self._hub, own.status)
        self._pace = pace_for(record, settings, self._learner, self._note)
        self._picture = Picture(own, learning, self._hub, self._dropped, self._answering, self._pace)
        self._steps = Steps(self._learner, self._aside, self._report, self._before_step, self._pace)
        ending.listen(self._hub.wake)
        self._behind = True

    def serve(self, ready: ReadyPipe) -> None:
        """Report READY, take over what a predecessor left, work until there is a reason to end, and end in order."""
        self._tell_of_resuming()
        self._snapshots.publish()
        self._picture.set_state(State.READY)
        ready.ready()
        _log.info("ready: step %d, %d experiences", self._trainer.step, len(self._learner.replay))
        self._metrics.open_tensorboard()
        while not self._ending.check():
            self._note.waiting()
            if self._pause.is_on:
                self._sit_out()
            elif self._behind:
                self._behind = self.catch_up(self._must_stop)
            else:
                if not self._hub.wait(self._pace.wait_s(0.0 if self._learner.may_train else _WAIT_S)):
                    self._train_between()
                self.train_due(self._must_stop)  # What a pause has interrupted.
                if not self._steps_come_first:
                    self._take_records(limit=64)
                self._snapshots.publish_if_due()
            self._look_around()
            self._folder.look()
        _log.info("ending: %s", self._ending.reason)
        self._picture.set_state(State.DRAINING)
        self._folder.look(at_once=True)
        self._behind = True  # Of a journal that grows now the size says nothing.
        drain = Drain(
            self, self._learning, self._hub, self._pace, self._note, self._saving, paused=lambda: self._pause.is_on
        )
        drain.run(for_good=self._ending.is_of_the_run)
        self._dropped.reap()
        self._picture.set_state(State.STOPPED)
        self._snapshots.close()
        self._hub.close(unlink=self._ending.is_of_the_run)

    def _must_stop(self) -> bool:
        return self._ending.is_asked() or self._pause.is_on

    @property
    def _steps_come_first(self) -> bool:
        # Before the next record, in the order that a successor has who reads the journal; a pace gives that up, for
        # nobody who asks for scores shall wait for it.
        return self._learner.steps_due > 0 and not self._pace.records_overtake

    def _record_overtakes(self) -> bool:
        # At the end what comes into the rings is the successor's, and the steps that are due are ours.
        is_ending = self._status.state is State.DRAINING
        return self._pace.records_overtake and not is_ending and self._hub.any_ready()

    def _sit_out(self) -> None:
        """Until the pause or the run ends: launch nothing."""
        self._trainer.synchronize()
        self._status.error = self._pause.reason
        self._picture.set_state(State.PAUSED)
        self._report.paused(self._status.error)
        while self._pause.is_on and not self._ending.check():
            # Not the doorbell: it rings for records that are not taken now.
            time.sleep(_WAIT_S)
            # A pause may last for hours, and the watchdog must see that it is none of ours.
            self._note.waiting()
            self._look_around()
        self._status.error = ""
        self._report.paused("")
        self._picture.set_state(State.READY)

    def close(self, *, unlink: bool = False) -> None:
        """Leave nothing in flight on the device and nothing open; without `unlink` channels stay for a successor."""
        self._trainer.synchronize()
        self._note.close()
        self._journal.close()
        self._metrics.close()
        self._snapshots.close()
        self._pace.close()
        self._hub.close(unlink=unlink and self._ending.is_of_the_run)
        if self._ring is not None:
            self._ring.close()

    def _tell_of_resuming(self) -> None:
        self._status.resumed_from = self._learning.resumed_from
        # The journal holds no scores: those since the checkpoint are told by the predecessor alone.
        counters = self._learner.counters
        counters.scored = max(counters.scored, self._status.scored)
        if self._learning.resumed_from is not None or self._status.restarts:
            self._metrics.write("resume", {"step": self._trainer.step, "batch": self._learner.counters.batches})
        if self._journal.unread:
            _log.info("%d bytes of the journal are to be taken first", self._journal.unread)

    def catch_up(self, stop: Callable[[], bool]) -> bool:
        """Take one record of the journal, as far as `stop` allows; whether we are behind still."""
        self.train_due(stop)
        if stop() or self._steps_come_first:
            return True
        record = self._journal.read()
        if record is None:
            return False
        name = RecordName(**record[0])
        # It stands there twice when it was delivered again and journaled before the first one was taken.
        if not self._learner.knows(name):
            batch = decode_batch(record[1], self._learning.columns)
            if self._aside.takes(name, batch):
                return True
            self._evaluate(name, batch)
            self._note.stage(Stage.TAKING)
            self._learner.take(name, batch)
            self.train_due(stop)
        return True

    def _take_records(self, limit: int) -> None:
        for _ in range(limit):
            delivery = self.receive()
            if delivery is None:
                return
            self._take(delivery)
            delivery.release()
            self.train_due(self._must_stop)
            # The reason to stop may be gone again, and its steps still come first.
            if self._steps_come_first or self._must_stop():
                return

    def receive(self) -> Delivery | None:
        """The next record of the rings; None while there is none."""
        while True:
            try:
                delivery = self._hub.receive()
            except CorruptRecordError as error:
                _log.warning("skipped a record: %s", error)
                continue
            if delivery is not None and self._ring is not None:
                delivery.hold_until(self._ring.wait)
            return delivery

    def _take(self, delivery: Delivery) -> None:
        name = RecordName.of(delivery.header)
        if self._aside.takes(name, delivery.batch):
            return
        if delivery.header.want_scores:
            self.score(delivery)
        if self._learner.knows(name):
            return
        self._evaluate(name, delivery.batch)
        # A disk that refuses it is not the doing of the experiences.
        self._note.stage(Stage.WRITING)
        self._journal.append(dataclasses.asdict(name), delivery.payload)
        self._note.stage(Stage.TAKING)
        self._learner.take(name, delivery.batch)
        self._journal.skip()

    def _evaluate(self, name: RecordName, batch: PackedBatch) -> None:
        self._note.record(Stage.EVALUATING, name, batch, self._trainer.step)
        self._learner.evaluate(batch)

    def score(self, delivery: Delivery) -> None:
        """Answer a record that asks for scores."""
        self._note.record(Stage.SCORING, RecordName.of(delivery.header), delivery.batch, self._trainer.step)
        self._answering.answer(delivery)

    def train_due(self, stop: Callable[[], bool]) -> None:
        """The steps that are due until `stop` or the pace yields; then the batch's metrics and perhaps a checkpoint."""
        before = self._trainer.step
        if not self._steps.take_due(stop, self._record_overtakes) and (stop() or not self._pace.records_overtake):
            return
        if not self._learner.batch_is_in and self._trainer.step == before:
            return
        self._note.stage(Stage.WRITING)
        if self._learner.batch_is_in:
            self._report.write(self._learner.close_batch(), self._picture.gauges() | self._picture.of_pace())
        self._snapshots.publish_if_due()
        self._picture.save()
        self._saving.save_if_due(behind=self._behind)

    def _before_step(self) -> None:
        # What is slow here is not the doing of the step before.
        self._note.stage(Stage.WRITING)
        self._picture.refresh()
        self._snapshots.publish_if_due()
        # The steps of one batch may take minutes, and all that the journal has taken since is at stake.
        self._folder.look()

    def _train_between(self) -> None:
        if self._learner.may_train and not self._must_stop():
            self._steps.take_another()
            self._saving.save_if_due(behind=self._behind)

    def _look_around(self) -> None:
        """Notice operators that live and that died; refresh the status now and then."""
        for producer in self._hub.producers():
            if producer.alive:
                self._ending.operator_seen()
        if self._pause.engine_is_starting:
            self._ending.engine_seen()
        if self._dropped.reap():
            # A successor has that from the status alone.
            self._picture.save()
        self._picture.refresh()

"""The feeder: everything of the operator that blocks, kept off the event loop.

consumes    batches of experiences, one `exchange` at a time, in one thread
produces    records in the run's feed ring; scores from its reply ring
waits for   scores, at most `score_timeout`; room in the ring, at most `block_timeout`
unblocked by the sidecar; its absence or death ends every wait at once

The feeder outlives sidecars: while the run lives, records wait in the ring for a restarted one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mps_trainer.columns import Array
from mps_trainer.config import Settings
from mps_trainer.errors import MpsTrainerError, PlacementError, RunError, TaskError, TransportError
from mps_trainer.operator.extract import ExperienceLike, Extracted, Extractor
from mps_trainer.operator.own_scores import OwnModel, OwnScores
from mps_trainer.operator.sidecar_figures import figures_of
from mps_trainer.run import RunPaths, RunRecord, State, Status, boot_id, find_by_namespace, host_name, is_held
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import OperatorChannel, RingSettings, names
from mps_trainer.transport.sweep import remove_run

logger = logging.getLogger(__name__)

#: Seconds between looks at what changes rarely: the sidecar's status, and a run to connect to.
LOOK_EVERY_S = 1.0
#: A ready sidecar attaches to a new channel within milliseconds of its ring; the first scores depend on it.
ATTACH_S = 1.0
#: Between looks at an idle run: when it has ended, its shared memory is given back before the next batch comes.
LOOK_IDLE_S = 5.0


@dataclass
class Exchange:
    """What one batch gave.

    Attributes:
        scores: (n,) float32 for the n experiences of the batch; NaN where there is none.
        version: the model version of the scores; -1 without scores.
        trained_ns: CLOCK_MONOTONIC when that model last took a training step; 0 without scores.
        late: (n,) bool; those that were fed and should have had a score (somebody was there to give it), and have none.
        metrics: plain ints and floats, the only types that survive Trinity's filter.
    """

    scores: Array
    late: Array
    version: int = -1
    trained_ns: int = 0
    metrics: dict[str, int | float] = field(default_factory=dict)

    def age_s(self, now_ns: int) -> float:
        """Seconds since the model that scored last took a training step, at `now_ns` of CLOCK_MONOTONIC."""
        return max(0, now_ns - self.trained_ns) / 1e9


class Feeder:
    """One operator's tie to a run. Not thread-safe: call it from one thread."""

    def __init__(self, settings: Settings, ray_namespace: str) -> None:
        self._settings = settings
        self._ray_namespace = ray_namespace
        self._task = load_task(settings.task, settings.task_args)
        columns = wire_columns(self._task)
        self._columns = columns
        self._extract = Extractor(columns)
        self._channel: OperatorChannel | None = None
        self._own_scores: OwnScores | None = None
        scores_here = settings.score_where == "operator" and settings.use != "feed"
        self._own_model = OwnModel(self._task) if scores_here else None
        self._paths: RunPaths | None = None
        self._request_id = 0
        self._status: Status | None = None
        self._next_look = 0.0
        self._said: set[str] = set()
        self._wrong_host = False
        self.run_dir: Path | None = None
        #: Experiences of ours that never reached a sidecar, over all channels.
        self.lost = 0

    def exchange(self, experiences: Sequence[ExperienceLike], *, want_scores: bool) -> Exchange:
        """Feed a batch and wait for its scores if they are wanted."""
        size = len(experiences)
        out = Exchange(np.full(size, np.nan, dtype=np.float32), late=np.zeros(size, dtype=bool))
        extracted = self._extract(experiences)
        self._tell_problems(extracted, out)
        channel = self._connected(out)
        out.metrics |= {"connected": int(channel is not None), "wrong_host": int(self._wrong_host)}
        if channel is None:
            return out
        if extracted.fed:
            try:
                self._send(channel, extracted, out, want_scores)
            except TransportError:
                if channel.segment.unlinked_error() is not None:
                    # Somebody removed the segment under us (a logout with RemoveIPC): the next batch makes a new one.
                    self.close()
                raise
        return out

    def close(self) -> None:
        """Leave the run. Records that the sidecar has not read stay for it, or go with the run if that has ended."""
        if self._channel is None or self._paths is None:
            return
        run_id, unread = self._channel.segment.header.run_id, self._channel.unread_rows()
        self._channel.close()
        self._channel = None
        if self._own_scores is not None:
            self._own_scores.close()
            self._own_scores = None
        if not is_held(self._paths.supervisor_lock):
            # What was kept for a successor has none. A sidecar whose supervisor was killed may still take it.
            remove_run(run_id)
            if not is_held(self._paths.sidecar_lock):
                self._count_unread(unread)
                # They left the run file because of us; it stays while another operator has not gone.
                self._paths.remove(keep_record=names.has_objects(run_id))

    def _count_unread(self, rows: int) -> None:
        if rows:
            self.lost += rows
            logger.warning("mps_trainer: the run ended before a sidecar had read %d experiences: they are lost", rows)

    def look(self) -> None:
        """While no batch comes: leave a run that has ended. Cheap; call it every `LOOK_IDLE_S`."""
        if self._channel is not None and self._paths is not None and not is_held(self._paths.supervisor_lock):
            self._look_at_status()
            self._say_once("the run has ended; experiences pass on without it")
            self.close()

    def connect(self) -> None:
        """Join the run; RunError or PlacementError says why not."""
        # The run file of another host is not here to be read, so the derived config carries the host as well.
        if self._settings.run_host:
            self._check_host(*self._settings.run_host.rsplit(maxsplit=1))
        paths, record = self._find_run()
        self._check_host(record.host, record.boot_id)
        self._check_alive(paths, record)
        settings = self._settings
        self._channel = OperatorChannel.create(
            record.run_id,
            self._columns,
            RingSettings(num_slots=settings.ring_slots, slot_bytes=settings.ring_slot),
            backpressure=settings.backpressure,
            block_timeout_s=settings.block_timeout,
        )
        self._paths, self.run_dir = paths, Path(record.run_dir)
        try:
            # It may have ended just before the channel was there, and then nobody else would remove it.
            self._check_alive(paths, record)
        except RunError:
            self.close()
            raise
        if self._own_model is not None:
            self._own_scores = self._own_model.join(self._columns, record.run_id, settings.batch_size)
        self._wait_for_attach(self._channel)
        logger.info("mps_trainer: feeding run %s (%s)", record.run_id, record.run_dir)

    def _check_alive(self, paths: RunPaths, record: RunRecord) -> None:
        if not is_held(paths.supervisor_lock):
            raise RunError(f"run {record.run_id} has ended", "start it again with start_mps.sh")

    def _check_host(self, host: str, boot: str) -> None:
        self._wrong_host = boot != boot_id()
        if self._wrong_host:
            raise PlacementError(
                f"the sidecar of this run is on host {host}, this operator runs on {host_name()}",
                "shared memory does not cross hosts: start the run on the node where Trinity's explorer runs",
            )

    def _wait_for_attach(self, channel: OperatorChannel) -> None:
        """Bounded, and no error: a restarting sidecar attaches later and finds what was fed meanwhile.

        The kernel's lock that proves the sidecar cannot be waited for with a time limit, so it is looked at.
        """
        deadline = time.monotonic() + ATTACH_S
        while not channel.sidecar_alive() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _find_run(self) -> tuple[RunPaths, RunRecord]:
        if self._settings.run_file:
            path = Path(self._settings.run_file)
            return RunPaths(path), RunRecord.load(path)
        found = find_by_namespace(self._ray_namespace)
        if found is None:
            raise RunError(
                f"no sidecar runs for the Ray namespace {self._ray_namespace!r}",
                "run scripts/start_mps.sh on your YAML first, and `trinity run` on the derived one that it prints",
            )
        return found

    def _connected(self, out: Exchange) -> OperatorChannel | None:
        self.look()
        if self._channel is None and not self._failed() and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            try:
                self.connect()
            except MpsTrainerError as error:
                self._say_once(str(error))
                if self._settings.on_error == "raise":
                    raise
        if self._channel is not None:
            self._look_at_sidecar(self._channel, out)
        self._tell_status(out)
        return self._channel

    def _send(self, channel: OperatorChannel, extracted: Extracted, out: Exchange, want_scores: bool) -> None:
        begin = time.monotonic()
        own = self._own_scores if want_scores else None
        self._request_id += 1
        try:
            # Before the batch is sent: weights from after that may have been trained on it.
            if own is not None:
                out.metrics |= own.refresh(begin + self._settings.score_timeout)
        finally:
            # Whatever is wrong with scores here, the sidecar learns.
            asks = want_scores and own is None
            sent = channel.send(extracted.rows, request_id=self._request_id, want_scores=asks)
        out.metrics |= {
            "fed": sent.rows_sent,
            "dropped_full": sent.rows_dropped,
            "fed_bytes": sent.nbytes,
            "evicted": sent.rows_evicted,
        }
        self.lost += sent.rows_dropped + sent.rows_evicted
        # The sidecar's count is behind, and stands still while there is none.
        known = max(self.lost, out.metrics.get("lost_total", 0))
        out.metrics |= {"lost_here_total": self.lost, "lost_total": known}
        if own is not None:
            self._score_here(own, extracted, out, begin, channel.sidecar_alive())
        elif want_scores:
            self._await_scores(channel, extracted, out, begin, sent.rows_sent > 0 and channel.sidecar_alive())

    def _await_scores(
        self, channel: OperatorChannel, extracted: Extracted, out: Exchange, begin: float, expected: bool
    ) -> None:
        waits = time.monotonic()
        reply = channel.receive_scores(self._request_id, self._settings.score_timeout) if expected else None
        out.metrics["score_wait_ms"] = (time.monotonic() - waits) * 1e3
        out.metrics["score_late"] = int(expected and reply is None)
        if reply is not None:
            out.metrics["score_latency_ms"] = (time.monotonic() - begin) * 1e3
            out.scores[extracted.fed] = reply.values
            out.version, out.trained_ns = reply.model_version, reply.trained_ns
        if expected:
            out.late[extracted.fed] = np.isnan(out.scores[extracted.fed])

    def _score_here(
        self, own: OwnScores, extracted: Extracted, out: Exchange, begin: float, sidecar_alive: bool
    ) -> None:
        scores = own.scores(extracted.rows, begin + self._settings.score_timeout)
        if scores is not None:
            out.metrics["score_latency_ms"] = (time.monotonic() - begin) * 1e3
            out.scores[extracted.fed] = scores
            out.version, out.trained_ns = own.version, own.trained_ns
        if scores is not None or sidecar_alive:
            out.late[extracted.fed] = np.isnan(out.scores[extracted.fed])
        out.metrics["score_late"] = int(out.late.any())

    def _look_at_sidecar(self, channel: OperatorChannel, out: Exchange) -> None:
        out.metrics["sidecar_up"] = int(channel.sidecar_alive())
        if time.monotonic() >= self._next_look or self._status is None:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            self._look_at_status()

    def _look_at_status(self) -> None:
        """Read the sidecar's own word, which stays in the run folder when the run's other files are gone."""
        assert self.run_dir is not None
        assert self._paths is not None
        try:
            self._status = Status.load(self.run_dir, self._paths.spare_status)
        except RunError:
            return
        if self._status.state is State.FAILED:
            self._say_once(f"the sidecar has failed; experiences pass on without it: {self._status.error}")
        if self._status.trouble:
            self._say_once(f"the sidecar: {self._status.trouble}")
        if self._status.state is State.PAUSED:
            self._say_once(f"the sidecar waits; experiences pass on without it: {self._status.error}")

    def _failed(self) -> bool:
        return self._status is not None and self._status.state is State.FAILED

    def _tell_status(self, out: Exchange) -> None:
        if self._status is None:
            return
        out.metrics |= figures_of(self._status)
        if self._failed() and self._settings.on_error == "raise":
            raise TaskError(f"the sidecar has failed: {self._status.error}", f"see sidecar.log in {self.run_dir}")

    def _tell_problems(self, extracted: Extracted, out: Exchange) -> None:
        out.metrics["missing_column"] = sum(extracted.problems.values())
        out.metrics["cut_sequences"] = extracted.cut
        if extracted.problems:
            self._say_once(extracted.first_problem)
            if self._settings.on_error == "raise":
                raise TaskError(extracted.first_problem)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("mps_trainer: %s", message)

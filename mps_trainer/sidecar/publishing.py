"""The sidecar's snapshots of its weights for operators that score by themselves (`score_where: operator`).

One is written when the model has taken steps since the last one, at most every `snapshot_every`, and never in more
than a twentieth of the time: a large model is copied from the GPU and written at a few GB/s, between two steps.
"""

from __future__ import annotations

import logging
import time

from mps_trainer.config import Settings
from mps_trainer.errors import PlacementError, TaskError, TransportError
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.tasks.model_weights import describe_weights, weights_bytes
from mps_trainer.transport import WeightsWriter
from mps_trainer.transport.shortage import ShortageError

_log = logging.getLogger(__name__)
_SHARE = 1 / 20
#: How long to try for the file while another process holds it.
TAKE_S = 5.0


class Snapshots:
    """None at all: the sidecar scores, or nobody does.

    Attributes:
        trained_ns: CLOCK_MONOTONIC of the last training step in the newest snapshot; 0 before the first.
    """

    trained_ns = 0

    def publish_if_due(self) -> None:
        """Publish what the model has learnt since the last snapshot, if it is time; cheap otherwise."""

    def publish(self) -> None:
        """Publish now."""

    def close(self) -> None:
        """Leave the file to operators and to a successor."""


class Publisher(Snapshots):
    """Writes the trainer's weights to shared memory; see above."""

    def __init__(self, trainer: Trainer, run_id: str, every_s: float) -> None:
        """Take the room in /dev/shm. PlacementError when there is none, with the bytes and what to raise.

        TransportError when something that passes has not passed in time: a successor may do better.
        """
        self._trainer = trainer
        self._every_s = every_s
        self._next = 0.0
        self._said = False
        self._writer = _writer(trainer, run_id)
        _log.info("snapshots of the weights take %.1f MiB of /dev/shm", self._writer.file_bytes / 2**20)

    def publish_if_due(self) -> None:
        """See `Snapshots`."""
        if self._trainer.trained_ns != self.trained_ns and time.monotonic() >= self._next:
            self.publish()

    def publish(self) -> None:
        """Publish now. A file that cannot be made again (/dev/shm is full) is a warning: training goes on."""
        begin = time.monotonic()
        trainer = self._trainer
        try:
            self._writer.publish(weights_bytes(trainer.model), version=trainer.step, trained_ns=trainer.trained_ns)
            self.trained_ns, self._said = trainer.trained_ns, False
        except (TransportError, OSError) as error:
            if not self._said:
                _log.warning("the weights of step %d were not published: %s", trainer.step, error)
            self._said = True
        except ValueError as error:
            raise TaskError(
                f"the tensors of the model are not those that it had at the start: {error}",
                "keep their shapes and types while it trains, or use score_where: sidecar",
            ) from error
        now = time.monotonic()
        self._next = now + max(self._every_s, (now - begin) / _SHARE)

    def close(self) -> None:
        """See `Snapshots`."""
        self._writer.close()


def _writer(trainer: Trainer, run_id: str) -> WeightsWriter:
    entries = describe_weights(trainer.model)
    deadline = time.monotonic() + TAKE_S
    while True:
        try:
            return WeightsWriter(run_id, entries)
        except TransportError as error:
            if isinstance(error, ShortageError) and error.of_room:
                raise PlacementError(error.message, error.todo) from error
            if time.monotonic() >= deadline:
                raise
        # A predecessor on its way out, a sweep that tries its locks, want of descriptors: nobody can post their end.
        time.sleep(0.02)


def snapshots_for(settings: Settings, trainer: Trainer, run_id: str) -> Snapshots:
    """What publishes if operators of this run read snapshots, else what does nothing."""
    if settings.score_where != "operator" or settings.use == "feed":
        return Snapshots()
    return Publisher(trainer, run_id, settings.snapshot_every)

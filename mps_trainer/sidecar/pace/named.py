"""The pace, with its own name in the file `doing` while it is asked.

An error there, or a kill in that moment, is none of the experiences' doing: without this the stage before (a record
that is taken into the replay buffer, a step) would be told as what was at work, and set aside the second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mps_trainer.config import Settings
from mps_trainer.config.pace import is_paced
from mps_trainer.run import RunRecord, Status
from mps_trainer.run.doing import Stage
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.noting import Note
from mps_trainer.sidecar.pace.gate import Gate, NoPace, Pace
from mps_trainer.sidecar.pace.source import Source


class NamedPace:
    """Asks another pace, and says so. What each method means is said there."""

    def __init__(self, pace: Pace, note: Note, learner: Learner) -> None:
        self._pace, self._note = pace, note
        self._told_of_due = learner.on_due
        learner.on_due = self._falls_due

    @property
    def records_overtake(self) -> bool:
        """As the pace that is asked."""
        return self._pace.records_overtake

    def may_step(self) -> bool:
        """As the pace that is asked."""
        with at_the_pace(self._note):
            return self._pace.may_step()

    def stepped(self, seconds: float) -> None:
        """As the pace that is asked."""
        with at_the_pace(self._note):
            self._pace.stepped(seconds)

    def wait_s(self, otherwise: float) -> float:
        """As the pace that is asked."""
        with at_the_pace(self._note):
            return self._pace.wait_s(otherwise)

    def drain(self, *, for_good: bool) -> None:
        """As the pace that is asked."""
        with at_the_pace(self._note):
            self._pace.drain(for_good=for_good)

    def close(self) -> None:
        """As the pace that is asked; nothing is at work any more."""
        self._pace.close()

    def describe(self, status: Status) -> None:
        """As the pace that is asked."""
        with at_the_pace(self._note):
            self._pace.describe(status)

    def _falls_due(self, steps: int) -> None:
        with at_the_pace(self._note):
            self._told_of_due(steps)


@contextmanager
def at_the_pace(note: Note) -> Iterator[None]:
    """Two notes of a microsecond; after an error the name stays, for the supervisor."""
    before = note.at
    note.stage(Stage.PACING)
    yield
    note.stage(before)


def pace_for(record: RunRecord, settings: Settings, learner: Learner, note: Note) -> Pace:
    """As the settings ask for."""
    if not is_paced(settings.pace, record.mps):
        return NoPace()
    with at_the_pace(note):
        gate = Gate(Source(record, settings.pace_tuning.silent), settings, learner)
    return NamedPace(gate, note, learner)

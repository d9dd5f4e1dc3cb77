"""What the supervisor asks for: a pause, as somebody else computes on the GPU, or a hold, as an engine is starting.

In a pause the sidecar launches nothing; under a hold it does not end for idling, for an operator follows the engine.

A file each in the run's MPS folder says so; that of a pause holds the reason. The loop looks between steps; records
wait in the rings meanwhile, where the operator's policy holds, and the operator passes experiences on as when scores
are late.
"""

from __future__ import annotations

from mps_trainer.mps.folder import mps_folder
from mps_trainer.run import RunRecord


class Pause:
    """Whether there is one, and why."""

    def __init__(self, record: RunRecord) -> None:
        self._path = mps_folder(record.run_id).pause_file
        self._hold = mps_folder(record.run_id).hold_file

    @property
    def is_on(self) -> bool:
        """One look at a local file; cheap enough for every step."""
        return self._path.exists()

    @property
    def engine_is_starting(self) -> bool:
        """Whether there is a hold: an engine is measuring memory."""
        return self._hold.exists()

    @property
    def reason(self) -> str:
        """A sentence for people; "" when the pause has ended."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""

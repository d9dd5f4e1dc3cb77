"""A pause that the supervisor asks for: somebody else computes on the sidecar's GPU, so the sidecar launches nothing.

A file in the run's MPS folder says so and holds the reason. The loop looks between steps; records wait in the rings
meanwhile, where the operator's policy holds, and the operator passes experiences on as when scores are late.
"""

from __future__ import annotations

from mps_trainer.mps.folder import mps_folder
from mps_trainer.run import RunRecord


class Pause:
    """Whether there is one, and why."""

    def __init__(self, record: RunRecord) -> None:
        self._path = mps_folder(record.run_id).pause_file

    @property
    def is_on(self) -> bool:
        """One look at a local file; cheap enough for every step."""
        return self._path.exists()

    @property
    def reason(self) -> str:
        """A sentence for people; "" when the pause has ended."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""

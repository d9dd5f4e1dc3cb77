"""The one line that the sidecar writes on the descriptor it was given: ready, or failed and why."""

from __future__ import annotations

import contextlib
import json
import os

from mps_trainer.errors import MpsTrainerError


class ReadyPipe:
    """Tells the supervisor once how the start ended. A negative descriptor tells nobody."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def ready(self) -> None:
        """{"state": "ready"}"""
        self._write({"state": "ready"})

    def failed(self, error: BaseException) -> None:
        """{"state": "failed", "error": ..., "todo": ...}; nothing after `ready`."""
        if isinstance(error, MpsTrainerError):
            message, todo = error.message, error.todo
        else:
            message, todo = f"{type(error).__name__}: {error}", "see sidecar.log in the run folder"
        self._write({"state": "failed", "error": message, "todo": todo})

    def _write(self, line: dict[str, str]) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        # A supervisor that died meanwhile is noticed by its lock, not here.
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)

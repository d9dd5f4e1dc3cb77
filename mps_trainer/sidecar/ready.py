"""What the sidecar says on the descriptor it was given, a JSON line each: waiting; then ready, or failed and why."""

from __future__ import annotations

import contextlib
import json
import os

from mps_trainer.errors import MpsTrainerError


class ReadyPipe:
    """Tells the supervisor how the start goes, and once how it ended. A negative descriptor tells nobody."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def waiting(self) -> None:
        """{"state": "waiting"}; more follows."""
        self._write({"state": "waiting"})

    def ready(self) -> None:
        """{"state": "ready"}"""
        self._write({"state": "ready"})
        self._close()

    def failed(self, error: BaseException) -> None:
        """{"state": "failed", "error": ..., "todo": ...}; nothing after `ready`."""
        if isinstance(error, MpsTrainerError):
            message, todo = error.message, error.todo
        else:
            message, todo = f"{type(error).__name__}: {error}", "see sidecar.log in the run folder"
        self._write({"state": "failed", "error": message, "todo": todo})
        self._close()

    def _write(self, line: dict[str, str]) -> None:
        if self._descriptor < 0:
            return
        # A supervisor that died meanwhile is noticed by its lock, not here.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

"""What a supervisor tells the `up` that started it: one JSON line for each event on a pipe.

    {"event": "progress", "message": ...}
    {"event": "ready", "pid": ...}
    {"event": "failed", "error": ..., "todo": ...}

After ready or failed the pipe is closed; an end without either means that the supervisor died.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable

from mps_trainer.errors import RunError


class Reporter:
    """The supervisor's end; its children do not inherit it.

    Attributes:
        abandoned: nobody listens any more; before READY that means that nobody wants the run.
    """

    def __init__(self, descriptor: int | None) -> None:
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
        self._descriptor = descriptor
        self.abandoned = False

    def progress(self, message: str) -> None:
        """Say what happens now."""
        self._send({"event": "progress", "message": message})

    def ready(self, pid: int) -> None:
        """Say that the sidecar is ready, once."""
        self._send({"event": "ready", "pid": pid})
        self.close()

    def failed(self, error: str, todo: str) -> None:
        """Say why there will be no sidecar."""
        self._send({"event": "failed", "error": error, "todo": todo})
        self.close()

    def close(self) -> None:
        """Close the pipe; later events go nowhere."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _send(self, event: dict[str, object]) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, (json.dumps(event) + "\n").encode())
        except BrokenPipeError:
            self.abandoned = True
            self.close()


def wait_until_ready(descriptor: int, timeout_s: float, progress: Callable[[str], None], log: str) -> int:
    """Read events until the sidecar is ready, and give its PID; RunError says why it is not.

    Args:
        descriptor: the reading end of the pipe.
        timeout_s: the longest wait.
        progress: called with each message.
        log: the supervisor's log, for the message when it dies silently.
    """
    end = time.monotonic() + timeout_s
    buffer = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(end - time.monotonic(), 0.0))
        if not ready:
            raise RunError(f"the sidecar was not ready after {timeout_s:.0f} s", f"see {log} and sidecar.log beside it")
        chunk = os.read(descriptor, 65536)
        if not chunk:
            raise RunError("the supervisor died while it started the sidecar", f"see {log} and sidecar.log beside it")
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "ready":
                return int(event["pid"])
            if event["event"] == "failed":
                raise RunError(event["error"], event["todo"])
            progress(event["message"])

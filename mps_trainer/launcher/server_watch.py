"""Whether the daemon's server takes new clients.

Each question starts a process, and its end wakes the supervisor: asked at each waking, it would never sleep.
"""

from __future__ import annotations

import time

from mps_trainer.errors import PlacementError
from mps_trainer.mps.control import MpsDaemon

_EVERY_S = 2.0


class ServerWatch:
    """Asks at most once in a while.

    Args:
        daemon: of the run.
        every_s: an answer is good for so long.
    """

    def __init__(self, daemon: MpsDaemon, every_s: float = _EVERY_S) -> None:
        self._daemon = daemon
        self._every_s = every_s
        self._next = 0.0
        self._trouble = ""

    def trouble(self) -> str:
        """Why a new client would be refused; "" when there is no server yet, or one that is well."""
        if time.monotonic() >= self._next:
            self._trouble = self._ask()
            self._next = time.monotonic() + self._every_s
        return self._trouble

    def forget(self) -> None:
        """Ask anew: a client has ended, and perhaps not well."""
        self._next = 0.0

    def _ask(self) -> str:
        try:
            for server in self._daemon.servers():
                if (status := self._daemon.server_status(server)) != "ACTIVE":
                    return f"the MPS server (process {server}) takes no clients: {status or 'no status'}"
        except PlacementError as error:
            return error.message
        return ""

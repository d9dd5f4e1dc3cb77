"""What the MPS server has logged of fatal GPU errors, after a sidecar's death.

The server names a client. That this is the one that did it is not known (`scripts/gpu_culprit.py` asks), so its word is
passed on and excuses nobody: a batch that is set aside for another's fault costs its experiences, one that is not set
aside for its own kills the next engine.
"""

from __future__ import annotations

import logging
import time

from mps_trainer.mps.control import GpuFault, MpsDaemon

log = logging.getLogger("mps_trainer.supervisor")

#: The server tells its clients of a fault before it has written all of it.
_LOG_DELAY_S = 1.0
_POLL_S = 0.05


class GpuFaults:
    """Reads the server's log once a death."""

    def __init__(self, daemon: MpsDaemon) -> None:
        self._daemon = daemon
        self._told = 0

    def after_death(self, pid: int, doing: str = "", *, saw_fault: bool = False) -> str:
        """Whom the server has named since the last death, in the log and for the run's status; "" when nobody.

        Args:
            pid: of the sidecar that has ended.
            doing: what it was doing.
            saw_fault: it ended because its GPU was broken, so the log has, or will have, a word on it.
        """
        faults = self._new()
        deadline = time.monotonic() + (_LOG_DELAY_S if saw_fault else 0.0)
        # The server writes to a file and tells nobody; only reading it again tells.
        while not any(_concerns(fault, pid) for fault in faults) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            faults = self._new()
        self._told += len(faults)
        told = ""
        for fault in faults:
            who = f"process {fault.pid}"
            if fault.pid == pid:
                who += f" (the sidecar{', ' if doing else ''}{doing})"
            log.error("fatal GPU error: the MPS server names %s; it ended the clients %s", who, fault.torn_down)
            told += f"; the MPS server names {who} for a fatal GPU error"
        return told

    def _new(self) -> list[GpuFault]:
        return self._daemon.faults()[self._told :]


def _concerns(fault: GpuFault, pid: int) -> bool:
    return pid == fault.pid or pid in fault.torn_down

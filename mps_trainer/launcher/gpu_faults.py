"""Who broke the GPU: what the MPS server has logged of fatal errors, after a sidecar's death."""

from __future__ import annotations

import logging
import time

from mps_trainer.mps.control import GpuFault, MpsDaemon

log = logging.getLogger("mps_trainer.supervisor")

#: The server tells its clients of a fault before it has written all of it.
_LOG_DELAY_S = 1.0
_POLL_S = 0.05


class GpuFaults:
    """Reads the server's log once a death.

    Attributes:
        by_others: the sidecar that ended last was torn down for a fatal GPU error that another process caused.
    """

    def __init__(self, daemon: MpsDaemon) -> None:
        self.by_others = False
        self._daemon = daemon
        self._told = 0

    def after_death(self, pid: int, doing: str = "", *, saw_fault: bool = False) -> str:
        """Name who broke the GPU since the last death, in the log and for the run's status; "" when nobody did.

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
        # A fault that tore down other clients only, such as an engine's before this life, excuses nothing.
        ours = [fault for fault in faults if _concerns(fault, pid)]
        self.by_others = bool(ours) and all(fault.pid != pid for fault in ours)
        told = ""
        for fault in faults:
            who = f"process {fault.pid}"
            if fault.pid == pid:
                who += f" (the sidecar{', ' if doing else ''}{doing})"
            log.error("fatal GPU error caused by %s; it ended the clients %s", who, fault.torn_down)
            told += f"; the MPS server names {who} for a fatal GPU error"
        return told

    def _new(self) -> list[GpuFault]:
        return self._daemon.faults()[self._told :]


def _concerns(fault: GpuFault, pid: int) -> bool:
    return pid == fault.pid or pid in fault.torn_down

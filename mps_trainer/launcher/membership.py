"""Which engines of a run are clients of its daemon: proven by PID, and what is not proven is not claimed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.summons import EngineRecord
from mps_trainer.run.process import is_descendant

log = logging.getLogger("mps_trainer.supervisor")


class Membership:
    """Judges each engine once when it says that it is up, and writes the proof, or its absence, to the log."""

    def __init__(self, daemon: MpsDaemon) -> None:
        self._daemon = daemon
        self._judged: set[int] = set()

    def prove(self, engines: Sequence[EngineRecord]) -> None:
        """Judge those that are new."""
        new = [e for e in engines if e.state == "ready" and e.request.pid not in self._judged]
        if not new:
            return
        unproven = {engine.request.pid for engine in self.unproven(engines)}
        for engine in new:
            pid = engine.request.pid
            self._judged.add(pid)
            if pid in unproven:
                log.warning(
                    "engine %s (pid %d) is up, but none of its processes is an MPS client", engine.request.actor, pid
                )
            else:
                log.info(
                    "engine %s (pid %d) is up and proven to be an MPS client, gpu_memory_utilization %s of %s wished",
                    engine.request.actor, pid, engine.utilization, engine.wished,
                )  # fmt: skip

    def unproven(self, engines: Sequence[EngineRecord]) -> list[EngineRecord]:
        """Engines that say they are up and of which no process is a client: their membership is not claimed."""
        up = [engine for engine in engines if engine.state == "ready"]
        if not up:
            return []
        clients = [client.pid for client in self._daemon.clients()]
        # Under Trinity the CUDA context is in a grandchild of the actor that asked.
        return [e for e in up if not any(is_descendant(client, e.request.pid) for client in clients)]

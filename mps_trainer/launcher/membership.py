"""Which engines of a run are clients of its daemon: proven by PID, and what is not proven is not claimed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from mps_trainer.errors import PlacementError
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.summons import EngineRecord
from mps_trainer.run.members import Member, save_members
from mps_trainer.run.process import is_descendant

log = logging.getLogger("mps_trainer.supervisor")

_EVERY_S = 2.0
# A daemon that has not answered so often in a row is asked no more: each question may hold up the supervisor.
_TRIES = 5


class Membership:
    """Judges each engine once when it says that it is up, and writes the proof, or its absence, to the log.

    Args:
        daemon: of the run.
        run_dir: where `members.json` goes; None for nowhere.
        every_s: pause after a question that the daemon has not answered.
    """

    def __init__(self, daemon: MpsDaemon, run_dir: Path | None = None, *, every_s: float = _EVERY_S) -> None:
        self._daemon = daemon
        self._run_dir = run_dir
        self._members: list[Member] = []
        self._every_s = every_s
        self._judged: set[int] = set()
        self._unanswered = 0
        self._next = 0.0

    def prove(self, engines: Sequence[EngineRecord]) -> None:
        """Judge those that are new. No answer is no proof, and no reason to end anything."""
        new = [e for e in engines if e.state == "ready" and e.request.pid not in self._judged]
        if not new or time.monotonic() < self._next:
            return
        try:
            unproven = {engine.request.pid for engine in self._unproven(engines)}
        except PlacementError as error:
            self._next = time.monotonic() + self._every_s
            self._give_up(new, error)
            return
        self._unanswered = 0
        for engine in new:
            pid = engine.request.pid
            self._note(engine, proven=pid not in unproven)
            if pid in unproven:
                log.warning(
                    "engine %s (pid %d) is up, but none of its processes is an MPS client", engine.request.actor, pid
                )
            else:
                log.info(
                    "engine %s (pid %d) is up and proven to be an MPS client, gpu_memory_utilization %s of %s wished",
                    engine.request.actor, pid, engine.utilization, engine.wished,
                )  # fmt: skip

    def _give_up(self, new: Sequence[EngineRecord], error: PlacementError) -> None:
        self._unanswered += 1
        log.info("nobody can say which engines are MPS clients: %s", error.message)
        if self._unanswered < _TRIES:
            return
        self._unanswered = 0
        for engine in new:
            self._note(engine, proven=None)
            log.warning(
                "engine %s (pid %d) is up and not proven to be an MPS client: the daemon did not answer %d times",
                engine.request.actor, engine.request.pid, _TRIES,
            )  # fmt: skip

    def _note(self, engine: EngineRecord, proven: bool | None) -> None:
        self._judged.add(engine.request.pid)
        self._members.append(Member(engine.request.actor, engine.request.pid, proven, engine.utilization))
        if self._run_dir is None:
            return
        try:
            save_members(self._run_dir, self._members)
        except OSError as error:
            # A full disk is no reason to leave a sidecar and a daemon without their supervisor.
            log.error("members.json does not name engine %d: %s", engine.request.pid, error)

    def _unproven(self, engines: Sequence[EngineRecord]) -> list[EngineRecord]:
        """Engines that say they are up and of which no process is a client: their membership is not claimed."""
        up = [engine for engine in engines if engine.state == "ready"]
        if not up:
            return []
        clients = [client.pid for client in self._daemon.clients()]
        # Under Trinity the CUDA context is in a grandchild of the actor that asked.
        return [e for e in up if not any(is_descendant(client, e.request.pid) for client in clients)]

"""Which engine was told which share of the GPU's memory, from the moment of the answer on.

    told "join, at most u" > [u is counted] > "config": the smaller number that it starts with > gone: nothing

An engine names its number a moment after the answer, in the same process. Until then a second one waits: it would get
what the whole share leaves, which is nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mps_trainer.launcher.memory_plan import ENGINE_EXTRA, MemoryPlan
from mps_trainer.mps.summons import EngineRecord, EngineRequest
from mps_trainer.run.process import ProcessIdentity

log = logging.getLogger("mps_trainer.supervisor")

#: An engine measures memory for a minute or two; after this it hangs, and its start is lost anyway.
ENGINE_START_S = 600.0
_UP = ("asking", "starting", "ready")


@dataclass(frozen=True)
class _Grant:
    request: EngineRequest
    process: ProcessIdentity | None
    utilization: float
    when: float = field(default_factory=time.monotonic)

    def record(self, engines: Sequence[EngineRecord]) -> EngineRecord | None:
        # By identity: a process that asks twice has two records with equal requests.
        return next((engine for engine in engines if engine.request is self.request), None)


class EngineShares:
    """The engines that were told to join. Its owner guards `grant` and `is_open`.

    Args:
        start_s: for how long the start of an engine keeps the sidecar as it is.
    """

    def __init__(self, start_s: float = ENGINE_START_S) -> None:
        self._start_s = start_s
        self._grants: list[_Grant] = []
        self._given_up: set[int] = set()

    def grant(self, request: EngineRequest, plan: MemoryPlan, engines: Sequence[EngineRecord]) -> float:
        """The plan's share, less what engines that live on this GPU have and take beside it; it counts at once."""
        taken = [self._taken(grant, record) for grant, record in self._beside(request, engines)]
        left = plan.utilization[0] - sum(taken) - len(taken) * ENGINE_EXTRA / plan.total
        utilization = max(0.0, math.floor(left * 1000) / 1000) if taken else plan.utilization[0]
        self._grants.append(_Grant(request, ProcessIdentity.of(request.pid), utilization))
        return utilization

    def is_open(self, request: EngineRequest, engines: Sequence[EngineRecord]) -> bool:
        """Whether an engine beside this one has been told its share and has not named its number yet."""
        return any(
            record.state != "ready" and record.utilization is None for _, record in self._beside(request, engines)
        )

    def any_measures(self, engines: Sequence[EngineRecord]) -> bool:
        """Whether an engine that was told to join is not up yet, so that the sidecar's memory must not change."""
        there = [(grant, grant.record(engines)) for grant in list(self._grants)]
        return any(record is not None and self._measures(grant, record) for grant, record in there)

    def _measures(self, grant: _Grant, record: EngineRecord) -> bool:
        if record.state not in ("asking", "starting"):
            return False
        if time.monotonic() - grant.when < self._start_s:
            return True
        if id(grant.request) not in self._given_up:
            self._given_up.add(id(grant.request))
            log.warning(
                "engine %s (pid %d) is not up after %.0f s: its start no longer keeps the sidecar as it is",
                grant.request.actor, grant.request.pid, self._start_s,
            )  # fmt: skip
        return False

    def _beside(self, request: EngineRequest, engines: Sequence[EngineRecord]) -> list[tuple[_Grant, EngineRecord]]:
        found = [(grant, grant.record(engines)) for grant in self._grants if grant.request.pid != request.pid]
        return [(g, e) for g, e in found if e is not None and e.state in _UP and g.process and g.process.is_running]

    @staticmethod
    def _taken(grant: _Grant, record: EngineRecord) -> float:
        return grant.utilization if record.utilization is None else min(grant.utilization, record.utilization)

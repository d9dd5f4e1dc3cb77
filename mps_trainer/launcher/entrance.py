"""When a sidecar may come to a shared GPU and leave it: its memory must not change while an engine measures.

restart > [an engine measures | somebody else is there | the server has not recovered] > start
            a stranger: for as long as it is there; the rest: for a limited time, then the run has failed
end     > no engine is told to join any more > those that were told are up, for a limited time > SIGTERM
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mps_trainer.errors import RunError
from mps_trainer.launcher.engine_shares import ENGINE_START_S
from mps_trainer.launcher.gpu_share import GpuShare
from mps_trainer.launcher.probation import Refusal
from mps_trainer.launcher.sidecar_process import SidecarProcess
from mps_trainer.launcher.wakeups import Wakeups
from mps_trainer.run import exit_codes

log = logging.getLogger("mps_trainer.supervisor")

#: Whoever ends the run waits for it (`down`: 75 s), and the sidecar's own end takes its part of that.
ENGINE_PATIENCE_S = 30.0
LAST_SIDECAR_PATIENCE_S = 10.0


def wait_to_enter(
    share: GpuShare | None, wakeups: Wakeups, tell: Callable[[str], object], limit_s: float = ENGINE_START_S
) -> Refusal | None:
    """Until a sidecar may be started; otherwise why the run has failed, or no error when it was asked to end.

    Args:
        tell: called with each new reason to wait.
        limit_s: for anything but a stranger, who may stay for hours: nothing is launched beside it.
    """
    if share is None:
        return None
    told, since = "", time.monotonic()
    while not wakeups.asked_to_end:
        if (refusal := share.refusal) is not None:
            return Refusal(refusal.message, refusal.todo, exit_codes.BAD_CONFIG)
        obstacle = share.obstacle()
        if not obstacle:
            return None
        if obstacle != told:
            log.info("the sidecar is not started again yet: %s", obstacle)
            tell(told := obstacle)
        if share.is_occupied:
            since = time.monotonic()
        elif time.monotonic() - since > limit_s:
            todo = "end the run with `mps-trainer down`, see supervisor.log, and start it again"
            return Refusal(f"no sidecar could be started again within {limit_s:.0f} s: {obstacle}", todo, 1)
        wakeups.sleep()
    return Refusal("", "", exit_codes.OK)


def why_no_last_sidecar(share: GpuShare | None, wakeups: Wakeups, patience_s: float = LAST_SIDECAR_PATIENCE_S) -> str:
    """Why the sidecar that would take what its predecessor left is not started, after some patience; "" to start it."""
    found = [""]

    def is_free() -> bool:
        found[0] = share.obstacle() if share is not None else ""
        return not found[0]

    if wakeups.wait(patience_s, is_free):
        return ""
    todo = "what was acknowledged is in the checkpoint and the journal; what was still in the rings is lost"
    return str(RunError(f"the run ended without a last sidecar: {found[0]}", todo))


def close_to_engines(
    share: GpuShare | None, sidecar: SidecarProcess, wakeups: Wakeups, patience_s: float = ENGINE_PATIENCE_S
) -> None:
    """Before the sidecar is ended: tell no engine to join any more, and let those finish that were told."""
    if share is None:
        return
    share.sidecar_is_gone("it is being ended", for_good=False)
    if not wakeups.wait(patience_s, lambda: not share.must_not_change or sidecar.child.poll() is not None):
        log.warning("the sidecar is ended although an engine still measures memory, after %.0f s", patience_s)

"""For a sidecar that hangs after its supervisor was killed: nobody is left to notice, so it notices itself.

    a thread of its own > the supervisor's lock has dropped > the loop has a while to end in order > else the end

The loop sees the dropped lock too, and ends in order within seconds; this thread acts only when user code lets no
loop go on. A hang that holds Python's lock (in C) stops this thread as well: such a sidecar stays, and
`mps-trainer status` still shows it.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mps_trainer.run import State, is_held
from mps_trainer.run.exit_codes import CRASHED
from mps_trainer.sidecar.gpu.faults import end_at_once
from mps_trainer.sidecar.own_files import OwnFiles

_log = logging.getLogger(__name__)
#: More than draining, a checkpoint and a slow step take together.
LIMIT_S = 60.0
_LOOK_S = 1.0
_SYNCHRONISE_S = 5.0


def watch_for_orphaning(supervisor_lock: Path, own: OwnFiles, synchronise: Callable[[], object]) -> threading.Thread:
    """Start the thread. `synchronise` waits for the GPU: a client of MPS must not end with work in flight."""
    thread = threading.Thread(target=_watch, args=(supervisor_lock, own, synchronise), name="orphan-watch", daemon=True)
    thread.start()
    return thread


def _watch(supervisor_lock: Path, own: OwnFiles, synchronise: Callable[[], object]) -> None:
    alone_since: float | None = None
    while alone_since is None or time.monotonic() - alone_since < LIMIT_S:
        time.sleep(_LOOK_S)
        if is_held(supervisor_lock):
            alone_since = None
        elif alone_since is None:
            alone_since = time.monotonic()
    _log.error("the supervisor is gone for %.0f s and the task lets nothing go on: ending; the stacks follow", LIMIT_S)
    faulthandler.dump_traceback(all_threads=True)
    # In a thread with a limit: the device may hang too.
    waiter = threading.Thread(target=synchronise, daemon=True)
    waiter.start()
    waiter.join(_SYNCHRONISE_S)
    own.status.state = State.FAILED
    own.status.error = (
        "the supervisor was killed, and the task hung: the sidecar ended itself; its stacks are in sidecar.log"
    )
    try:
        own.save_at_end()
    finally:
        end_at_once(CRASHED)

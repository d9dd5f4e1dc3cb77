"""The real sidecar with one thing changed: `changed.py CHANGE VALUE --run-file ... --ready-fd N`.

drain SECONDS       a shorter time limit for the drain, which else has long enough for a slow machine
full-disk N         the journal's N-th append finds no room on the disk
mocked-driver S     copies as on a GPU, by a driver that answers every registration with status S; a release before the
                    copies are waited for ends the process
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from mocked_cuda import MockedCuda

from mps_trainer.errors import RunError
from mps_trainer.sidecar import draining, startup
from mps_trainer.sidecar.__main__ import main
from mps_trainer.sidecar.gpu.ring_memory import RingMemory
from mps_trainer.sidecar.journal import Journal
from mps_trainer.transport.attached import AttachedChannel


def no_room(function: Callable[..., Any], countdown: int) -> Callable[..., Any]:
    def wrapped(*args: Any) -> None:
        nonlocal countdown
        countdown -= 1
        if countdown == 0:
            raise RunError("no room", "free space")
        function(*args)

    return wrapped


def copied_first(free: Callable[..., Any], cuda: MockedCuda) -> Callable[..., Any]:
    def wrapped(*args: Any) -> None:
        assert not cuda.pending, "a slot is released with copies under way"
        free(*args)

    return wrapped


if __name__ == "__main__":
    change, value = sys.argv[1:3]
    sys.argv[1:3] = []
    draining.DRAIN_S = 90.0
    if change == "drain":
        draining.DRAIN_S = float(value)
    elif change == "mocked-driver":
        cuda = MockedCuda(int(value), sys.stderr)
        startup.ring_for = lambda device: RingMemory(device, cuda)
        AttachedChannel.free = copied_first(AttachedChannel.free, cuda)  # type: ignore[method-assign]
    else:
        Journal.append = no_room(Journal.append, int(value))  # type: ignore[method-assign]
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())

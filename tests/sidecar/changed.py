"""The real sidecar with one thing changed: `changed.py CHANGE VALUE --run-file ... --ready-fd N`.

drain SECONDS       a shorter time limit for the drain
full-disk N         the journal's N-th append finds no room on the disk
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mps_trainer.errors import RunError
from mps_trainer.sidecar import loop
from mps_trainer.sidecar.__main__ import main
from mps_trainer.sidecar.journal import Journal


def no_room(function: Callable[..., Any], countdown: int) -> Callable[..., Any]:
    def wrapped(*args: Any) -> None:
        nonlocal countdown
        countdown -= 1
        if countdown == 0:
            raise RunError("no room", "free space")
        function(*args)

    return wrapped


if __name__ == "__main__":
    change, value = sys.argv[1:3]
    sys.argv[1:3] = []
    if change == "drain":
        loop._DRAIN_S = float(value)
    else:
        Journal.append = no_room(Journal.append, int(value))  # type: ignore[method-assign]
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())

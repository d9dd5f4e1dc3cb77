"""Which engines of a run share the sidecar's GPU through MPS: `members.json` in the run folder.

Maker: the supervisor, once for each engine that is up. Eaters: `mps-trainer status` and `report`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mps_trainer.run.private_files import write_private

_FILE = "members.json"


@dataclass(frozen=True)
class Member:
    """One engine.

    Attributes:
        actor: Ray's name of it.
        proven: whether one of its processes is a client of the run's daemon; None when nobody could say.
        utilization: the gpu_memory_utilization that it was given.
    """

    actor: str
    pid: int
    proven: bool | None
    utilization: float | None = None

    def __str__(self) -> str:
        word = {True: "an MPS client, proven", False: "NOT an MPS client", None: "not proven"}[self.proven]
        return f"{self.actor or 'engine'} (pid {self.pid}): {word}"


def save_members(run_dir: Path, members: Sequence[Member]) -> None:
    """Write them by rename; OSError when the disk refuses."""
    write_private(run_dir / _FILE, json.dumps([asdict(member) for member in members], indent=1))


def load_members(run_dir: Path) -> list[Member]:
    """What stands there; none when there is no such file or it is damaged."""
    try:
        return [Member(**item) for item in json.loads((run_dir / _FILE).read_text())]
    except (OSError, ValueError, TypeError, RecursionError):
        return []

"""What the sidecar says of itself: `status.json` in the run folder, replaced by rename.

Maker: the sidecar (and the supervisor, for RESTARTING and FAILED after a death). Eaters: `mps-trainer status`,
the supervisor, the operator (once in a while, for its metrics) and `mps-trainer report`.

    STARTING -> READY -> DRAINING -> STOPPED       asked to end, everything saved
        |         |`--> RESTARTING -> STARTING     killed; the supervisor starts a new one
        `---------+---> FAILED                     a task error, or too many restarts; the rollout goes on without
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from mps_trainer.errors import RunError


class State(str, Enum):
    """The sidecar's state; see the drawing above."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(kw_only=True)
class Status:
    """One picture of the sidecar. Counters are totals over the run, restarts included.

    Attributes:
        version: training steps that the model has taken (the version that scores carry).
        restarts: how often the supervisor started a new sidecar.
        experiences: received from operators; `trained` counts draws from the replay buffer.
        loss, first_loss, auc, first_auc: None before there is one.
        error: the message of a FAILED sidecar, with what to do.
    """

    run_id: str
    state: State = State.STARTING
    pid: int = 0
    device: str = "cpu"
    version: int = 0
    restarts: int = 0
    resumed_from: int | None = None
    batches: int = 0
    experiences: int = 0
    duplicates: int = 0
    trained: int = 0
    scored: int = 0
    loss: float | None = None
    first_loss: float | None = None
    auc: float | None = None
    first_auc: float | None = None
    replay_size: int = 0
    memory_bytes: int = 0
    error: str = ""
    updated: float = field(default_factory=time.time)

    def save(self, run_dir: Path) -> None:
        """Write `status.json` by rename."""
        self.updated = time.time()
        temporary = run_dir / "status.json.tmp"
        temporary.write_text(json.dumps(asdict(self), indent=2))
        temporary.replace(run_dir / "status.json")

    @classmethod
    def load(cls, run_dir: Path) -> Status:
        """Read `status.json`; RunError when there is none."""
        path = run_dir / "status.json"
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise RunError(f"{path} does not exist", "the sidecar has not started; see sidecar.log beside it") from None
        return cls(**{**data, "state": State(data["state"])})

"""What the sidecar says of itself: `status.json` in the run folder, replaced by rename. While that folder refuses it
(a full disk, a removed folder) it stands in the state folder, `RunPaths.spare_status`.

Maker: the sidecar (and the supervisor, for RESTARTING and FAILED after a death). Eaters: `mps-trainer status`,
the supervisor, the operator (once in a while, for its metrics) and `mps-trainer report`.

    STARTING -> READY -> DRAINING -> STOPPED       asked to end, everything saved
        |         |`--> PAUSED -> READY            somebody else computes on its GPU; `error` says who
        |         |`--> RESTARTING -> STARTING     killed; the supervisor starts a new one
        |---------+---> FAILED                     a task error, or too many restarts; the rollout goes on without
        `--> WAITING -> STARTING                   imports done; the first rollout engine says on which GPU
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from mps_trainer.errors import RunError
from mps_trainer.run.private_files import write_private


class State(str, Enum):
    """The sidecar's state; see the drawing above."""

    STARTING = "starting"
    WAITING = "waiting"
    READY = "ready"
    PAUSED = "paused"
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
        score_age_s: seconds since the model whose scores operators get last took a training step, when this was
            written; None before the first score.
        score_latency_ms_p50, score_latency_ms_p99: of the last replies, from the operator's send to the reply; None
            where the operator scores by itself.
        replay_size: experiences in the replay buffer.
        lost_oldest, lost_newest: experiences that never arrived, by the back-pressure policy that dropped them.
        lost_oldest_gone, lost_newest_gone: of those, what operators had dropped whose channels are removed.
        backlog, backlog_age_s: records sent and not yet taken, and how long ago the oldest unread one was sent.
        memory_bytes: resident size of the process. gpu_memory_bytes: the most that its tensors have taken on the GPU;
            None on the CPU. memory_cap_bytes: the reservation; on the CPU a wish (`memory`), None without one.
        ring_registered: whether the driver has page-locked the feed rings, so that batches reach the GPU by DMA;
            None on the CPU and before the first operator.
        steps_owed, steps_skipped: training steps that are due, and that were given up because too many were.
        pace_source: what the pace goes by: "engine", "nvml", "arrivals"; "" where there is none (`docs/pace.md`).
        pace_share: of the time in which the rollout was busy, the share spent training; None before any.
        pace_slowdown: by which share the engine is slower while the sidecar trains, measured; None while unknown.
        pace_note: what of the pace's settings cannot be kept.
        set_aside: experiences that killed or hung a sidecar and are kept from its successors (`set_aside/`).
        damaged_records: stretches of the journal that could not be read and are kept beside it (`journal/damaged-*`).
        last_death: how the last sidecar that did not end in order ended, and what it was doing.
        trouble: what of its own files the sidecar cannot write (a full disk), while training goes on.
        error: the message of a FAILED sidecar, with what to do; why a PAUSED one waits.
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
    score_age_s: float | None = None
    score_latency_ms_p50: float | None = None
    score_latency_ms_p99: float | None = None
    replay_size: int = 0
    lost_oldest: int = 0
    lost_newest: int = 0
    lost_oldest_gone: int = 0
    lost_newest_gone: int = 0
    backlog: int = 0
    backlog_age_s: float = 0.0
    memory_bytes: int = 0
    memory_cap_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    ring_registered: bool | None = None
    steps_owed: int = 0
    steps_skipped: int = 0
    pace_source: str = ""
    pace_share: float | None = None
    pace_slowdown: float | None = None
    pace_note: str = ""
    set_aside: int = 0
    damaged_records: int = 0
    last_death: str = ""
    trouble: str = ""
    error: str = ""
    updated: float = field(default_factory=time.time)

    def save(self, run_dir: Path, spare: Path | None = None) -> None:
        """Write `status.json` by rename; OSError when that fails, and then it stands in `spare` if that can be."""
        self.updated = time.time()
        content = json.dumps(self.to_json(), indent=2)
        try:
            write_private(run_dir / "status.json", content)
        except OSError:
            if spare is not None:
                with contextlib.suppress(OSError):
                    write_private(spare, content)
            raise
        if spare is not None:
            with contextlib.suppress(OSError):
                spare.unlink(missing_ok=True)

    def to_json(self) -> dict[str, Any]:
        """Plain values of every field."""
        return asdict(self)

    @classmethod
    def load(cls, run_dir: Path, spare: Path | None = None) -> Status:
        """Read `status.json`, or `spare` if that is newer; RunError when it is missing, cannot be read or is none."""
        aside = None if spare is None else cls._read_spare(spare)
        try:
            found = cls._read(run_dir / "status.json")
        except RunError:
            if aside is None:
                raise
            return aside
        return aside if aside is not None and aside.updated > found.updated else found

    @classmethod
    def _read_spare(cls, path: Path) -> Status | None:
        try:
            return cls._read(path)
        except RunError:
            return None

    @classmethod
    def _read(cls, path: Path) -> Status:
        try:
            return cls._from_json(json.loads(path.read_text()))
        except FileNotFoundError:
            raise RunError(f"{path} does not exist", "the sidecar has not started; see sidecar.log beside it") from None
        except OSError as error:
            raise RunError(
                f"cannot read {path}: {error.strerror}",
                "name a run folder, <name>.mps-trainer/<run id>, as the user who started the run",
            ) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise RunError(
                f"{path} is no status of a sidecar: {error}",
                "see sidecar.log beside it; a live sidecar replaces the file within seconds, else start the run again",
            ) from None

    @classmethod
    def peek(cls, run_dir: Path, spare: Path | None = None) -> Status | None:
        """As `load`, None instead of an error."""
        try:
            return cls.load(run_dir, spare)
        except RunError:
            return None

    @classmethod
    def _from_json(cls, data: Any) -> Status:
        """ValueError or TypeError for anything that `save` cannot have written."""
        if not isinstance(data, dict):
            raise TypeError(f"it holds a {type(data).__name__}, not an object")
        missing = {"run_id", "state"} - data.keys()
        if missing:
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        values = {**data, "state": State(data["state"])}
        kinds = get_type_hints(cls)
        for name, value in values.items():
            kind = kinds.get(name)
            # A float without a fraction is a whole number to other writers of JSON; a bool is an int to Python only.
            number = isinstance(value, int) and kind in (float, float | None)
            wrong_bool = isinstance(value, bool) and kind != bool | None
            if (kind is not None and not number and not isinstance(value, kind)) or wrong_bool:
                raise TypeError(f"{name} is {value!r}")
        return cls(**values)

"""A run on one screen: rows of a label and a text, for `status` and `status --watch`. Eighty columns are enough."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mps_trainer.config import format_size
from mps_trainer.run import RunRecord, State, Status, is_run_alive
from mps_trainer.run.figures import Figures

Row = tuple[str, str, str]  # label, text, style of the text

LABEL_WIDTH = 10
_TROUBLE = "yellow"
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 28
# The sidecar writes its status every second; one that is in a long step, or hangs, does not.
_OLD_S = 5.0
#: Less than a checkpoint of the smallest task needs.
_LITTLE_ROOM = 2**20
_PROVEN = (State.READY, State.PAUSED, State.DRAINING)
_OVER = (State.STOPPED, State.FAILED)
_STATE_STYLES = {State.READY: "green", State.STOPPED: "", State.FAILED: "bold red"}


@dataclass(frozen=True)
class Subject:
    """The run that is looked at.

    Attributes:
        config: the user's YAML; "" when only the folder is known.
        mps: "on" or "off", resolved.
    """

    run_id: str
    run_dir: Path
    config: str
    mps: str

    @classmethod
    def of_run(cls, record: RunRecord) -> Subject:
        """A live run."""
        return cls(record.run_id, Path(record.run_dir), record.config, record.mps)

    @classmethod
    def of_folder(cls, run_dir: Path) -> Subject:
        """Whatever a run folder says. RunError when it is none."""
        status = Status.load(run_dir)
        try:
            settings: Any = json.loads((run_dir / "settings.json").read_text())
        except (OSError, ValueError, RecursionError):
            settings = {}
        mps = settings.get("mps") if isinstance(settings, dict) else None
        return cls(status.run_id, run_dir, "", mps if mps in ("on", "off") else "off")

    @property
    def is_alive(self) -> bool:
        """Whether its supervisor or its sidecar lives."""
        return is_run_alive(self.run_id)


def rows(subject: Subject, figures: Figures, *, alive: bool) -> list[Row]:
    """The whole screen of one run."""
    status = figures.status
    head: list[Row] = [("run", f"{subject.run_id}{f'   {_short(subject.config)}' if subject.config else ''}", "bold")]
    if status is None:
        return [*head, ("state", "starting" if alive else "no word of a sidecar", ""), _folder(subject)]
    return [
        *head,
        ("state", _state(status, alive), _STATE_STYLES.get(status.state, _TROUBLE) if alive else ""),
        *([("speed", _speed(figures), "")] if alive else []),
        ("learned", _learned(status, alive), ""),
        ("loss", _course(status.loss, status.first_loss, figures.losses), ""),
        ("AUC", _course(status.auc, status.first_auc, figures.aucs), ""),
        ("backlog", _backlog(status), _TROUBLE if status.backlog_age_s > _OLD_S else ""),
        ("drops", _drops(status, figures), _TROUBLE if _lost(status, figures) else ""),
        ("scores", _scores(status, figures), ""),
        *([("pace", _pace(status), _TROUBLE if status.pace_note else "")] if status.pace_source else []),
        ("memory", _memory(status), ""),
        ("mps", _membership(subject, status, figures), ""),
        *_trouble(subject, status, alive),
        _folder(subject),
    ]


def one_line(subject: Subject, figures: Figures, *, alive: bool) -> str:
    """The same in one line, for a log."""
    status = figures.status
    if status is None:
        return f"{subject.run_id} starting"
    parts = [
        f"{subject.run_id} {_state_word(status, alive)}",
        f"step {status.version}",
        f"{_per_s(figures.steps_per_s)} steps/s",
        f"{_per_s(figures.experiences_per_s)} exp/s",
        f"loss {_number(status.loss)}",
        f"auc {_number(status.auc)}",
        f"backlog {status.backlog}",
        f"removed {figures.removed or 0}",
        f"lost {_lost(status, figures)}",
        f"restarts {status.restarts}",
    ]
    return "  ".join(parts)


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """At most `width` bars, each the mean of its share of the values, between their lowest and their highest."""
    if len(values) < 2:
        return ""
    size = min(width, len(values))
    edges = [i * len(values) // size for i in range(size + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    top = len(_BARS) - 1
    return "".join(_BARS[round(top * (value - low) / span) if span > 0 else top // 2] for value in means)


def _state_word(status: Status, alive: bool) -> str:
    # A killed run has said nothing of its end; these two states say it.
    return status.state.value + ("" if alive or status.state in _OVER else " (not running)")


def _state(status: Status, alive: bool) -> str:
    parts = [f"{_state_word(status, alive)} on {status.device}"]
    if alive and status.pid:
        parts[0] += f" (process {status.pid})"
    parts.append(_count(status.restarts, "restart"))
    if alive and (silent := time.time() - status.updated) > _OLD_S:
        parts.append(f"last word {silent:.0f} s ago")
    return ", ".join(parts)


def _speed(figures: Figures) -> str:
    speeds = f"{_per_s(figures.steps_per_s)} steps/s, {_per_s(figures.experiences_per_s)} experiences/s"
    return f"{speeds} (last 30 s)"


def _learned(status: Status, alive: bool) -> str:
    if alive and not status.batches:
        return "no batch yet (Trinity takes a minute or more to its first one)"
    return f"{status.version:,} steps on {_count(status.experiences, 'experience')}, {_batches(status)}"


def _batches(status: Status) -> str:
    return f"{status.batches:,} batch{'' if status.batches == 1 else 'es'}"


def _course(now: float | None, first: float | None, values: Sequence[float]) -> str:
    if now is None:
        return "-"
    return f"{now:.3f} now, {_number(first)} first   {sparkline(values)}".rstrip()


def _backlog(status: Status) -> str:
    text = f"{_count(status.backlog, 'record')} in the ring"
    return f"{text}, the oldest unread for {status.backlog_age_s:.1f} s" if status.backlog_age_s else text


def _drops(status: Status, figures: Figures) -> str:
    removed = f"{figures.removed or 0:,} of {figures.seen:,} by the operator, " if figures.seen else ""
    return f"{removed}{_lost(status, figures):,} lost to a full ring"


def _lost(status: Status, figures: Figures) -> int:
    # Without a sidecar only the operators count, and one of before `lost_here_total` only the sidecar.
    return max(status.lost_oldest + status.lost_newest, figures.lost or 0)


def _scores(status: Status, figures: Figures) -> str:
    if status.scored:
        parts = [f"{status.scored:,} given"]
    elif figures.score_wait_ms_p50 is not None:
        parts = ["given by the operator itself"]
    else:
        return "none asked for"
    if figures.score_wait_ms_p50 is not None and figures.score_wait_ms_p99 is not None:
        parts.append(f"in {figures.score_wait_ms_p50:.1f} ms (p99 {figures.score_wait_ms_p99:.1f})")
    if figures.score_age_s is not None:
        parts.append(f"age {figures.score_age_s:.1f} s")
    return ", ".join([*parts, f"{figures.late or 0:,} late"])


def _pace(status: Status) -> str:
    by = {"engine": "the engine's own word", "nvml": "NVML", "arrivals": "the arrival of batches"}
    share = "-" if status.pace_share is None else f"{status.pace_share:.0%}"
    slower = "not measured yet" if status.pace_slowdown is None else f"{status.pace_slowdown:.1%} meanwhile"
    source = by.get(status.pace_source, status.pace_source)
    text = f"trains {share} of the rollout's time, slows it {slower}; goes by {source}"
    owed = f"{text}; {_count(status.steps_owed, 'step')} owed, {status.steps_skipped:,} skipped"
    return f"{owed}. {status.pace_note}" if status.pace_note else owed


def _memory(status: Status) -> str:
    resident, cap = format_size(status.memory_bytes), status.memory_cap_bytes
    if status.gpu_memory_bytes is None:
        return f"{resident}, {f'wish {format_size(cap)}, not enforced' if cap else 'no cap'} on the CPU"
    of = f" of {format_size(cap)}" if cap else ", no cap"
    return f"{format_size(status.gpu_memory_bytes)}{of} on the GPU (peak); process {resident}"


def _membership(subject: Subject, status: Status, figures: Figures) -> str:
    if subject.mps != "on":
        return "off"
    sidecar = "a client, proven before READY" if status.state in _PROVEN else "not READY, so not proven"
    engines = "; ".join(map(str, figures.members)) or "no engine is up"
    return f"on; the sidecar is {sidecar}; {engines}"


def _trouble(subject: Subject, status: Status, alive: bool) -> list[Row]:
    found = [text for text in (status.error, status.trouble, _room(subject.run_dir) if alive else "") if text]
    if status.ring_registered is False:
        found.append("ring_registered is False, so batches reach the GPU slowly; sidecar.log says what to raise")
    if status.state is State.WAITING:
        found.append("waiting for the first rollout engine, imports done")
    if status.last_death and status.last_death not in status.error:
        found.append(f"before its last restart: {status.last_death}")
    if status.set_aside:
        found.append(f"{status.set_aside:,} experiences are set aside in {subject.run_dir / 'set_aside'}")
    if status.damaged_records:
        damaged = f"{status.damaged_records:,} damaged stretches of the journal were skipped and are kept"
        found.append(f"{damaged} in {subject.run_dir / 'journal'}")
    return [("note" if i == 0 else "", text, _TROUBLE) for i, text in enumerate(found)]


def _room(run_dir: Path) -> str:
    """That the disk is full or the folder gone, seen from here: then the sidecar may not be able to say it."""
    try:
        free = shutil.disk_usage(run_dir).free
    except FileNotFoundError:
        return "the run folder is not there any more"
    except OSError as error:
        return f"the run folder cannot be looked at: {error.strerror}"
    return "" if free >= _LITTLE_ROOM else f"the disk of the run folder is full: {format_size(free)} free"


def _folder(subject: Subject) -> Row:
    return ("folder", _short(str(subject.run_dir)), "dim")


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return relative if len(relative) < len(path) else path


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _per_s(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

"""What happened in a run and when: lives of the sidecar, pauses, experiences set aside."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.report.series import read_lines

_STAMPED = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (.*)$")
_STARTED = re.compile(r"^sidecar (\d+) started$")
_READY = re.compile(r"^sidecar (\d+) is ready$")
_ENDED = re.compile(r"^sidecar (\d+) (ended: .*|ended when asked|already gone|killed .*|still alive)$")
_TOLD = re.compile(
    r"^(sidecar \d+ (started|is |ended|already|killed|still)|engine |no Prometheus|ending sidecar|summoned)"
)
_MOST_EVENTS = 60


@dataclass(frozen=True)
class Event:
    """One thing that happened, `when` in seconds since the epoch."""

    when: float
    text: str


@dataclass
class Life:
    """One sidecar; times since the epoch, None for what has not come."""

    pid: int
    started: float
    ready: float | None = None
    ended: float | None = None
    how: str = ""


@dataclass(frozen=True)
class Pause:
    """The sidecar launched nothing; `end` is None while it goes on."""

    begin: float
    end: float | None
    reason: str


@dataclass(frozen=True)
class History:
    """The whole of it, in order of time."""

    lives: list[Life]
    pauses: list[Pause]
    set_aside: list[Event]
    events: list[Event]

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to draw: one life, no pause, nothing set aside."""
        return len(self.lives) < 2 and not self.pauses and not self.set_aside


def read_history(run_dir: Path) -> History:
    """From supervisor.log, metrics.jsonl and set_aside/; what cannot be read is left out."""
    logged = _logged(run_dir / "supervisor.log")
    pauses, aside = _pauses(run_dir), _set_aside(run_dir)
    told = [event for event in logged if _TOLD.match(event.text)]
    told += aside + [Event(pause.begin, f"paused: {pause.reason}") for pause in pauses]
    return History(_lives(logged), pauses, aside, sorted(told, key=lambda event: event.when)[-_MOST_EVENTS:])


def _logged(path: Path) -> list[Event]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for match in filter(None, map(_STAMPED.match, lines)):
        try:
            # The log has the local time of the machine, as this process has on the same machine.
            when = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S"))
        except (ValueError, OverflowError):
            continue
        events.append(Event(when + int(match[2]) / 1e3, match[3]))
    return events


def _lives(logged: list[Event]) -> list[Life]:
    lives: list[Life] = []
    for event in logged:
        if match := _STARTED.match(event.text):
            lives.append(Life(int(match[1]), event.when))
        elif (match := _READY.match(event.text)) and lives and lives[-1].pid == int(match[1]):
            lives[-1].ready = event.when
        elif (match := _ENDED.match(event.text)) and lives and lives[-1].pid == int(match[1]):
            lives[-1].ended, lives[-1].how = event.when, match[2]
    return lives


def _pauses(run_dir: Path) -> list[Pause]:
    pauses: list[Pause] = []
    begun: tuple[float, str] | None = None
    for line in read_lines(run_dir / "metrics.jsonl"):
        when = line.get("t")
        if line.get("kind") != "pause" or isinstance(when, bool) or not isinstance(when, (int, float)):
            continue
        if line.get("paused") and begun is None:
            begun = (float(when), str(line.get("reason", "")))
        elif not line.get("paused") and begun is not None:
            pauses.append(Pause(begun[0], float(when), begun[1]))
            begun = None
    return [*pauses, Pause(begun[0], None, begun[1])] if begun else pauses


def _set_aside(run_dir: Path) -> list[Event]:
    events = []
    for path in sorted((run_dir / "set_aside").glob("*.json")):
        try:
            facts = json.loads(path.read_text())
            text = f"{int(facts['experiences'])} experiences set aside ({path.stem}): {facts['cause']}"
            events.append(Event(path.stat().st_mtime, text))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # noqa: PERF203  # a torn note
            continue
    return events

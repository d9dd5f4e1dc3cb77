"""`status --watch`: the screen of a run once a second, or on something that is no terminal a line now and then."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from mps_trainer.cli import screen, show
from mps_trainer.cli.screen import Subject
from mps_trainer.run import run_paths
from mps_trainer.run.figures import Figures, Watcher

REFRESH_S = 1.0
LINE_EVERY_S = 5.0


class Watch:
    """Looks at some runs until the last of them has ended.

    Args:
        every_s: between two looks; None for a second on a terminal and five for lines.
    """

    def __init__(self, subjects: Sequence[Subject], every_s: float | None = None) -> None:
        self._every_s = every_s
        self._watched = [
            (subject, Watcher(subject.run_dir, run_paths(subject.run_id).spare_status)) for subject in subjects
        ]

    def run(self, *, as_json: bool = False) -> None:
        """Until the runs end or somebody presses Ctrl-C, which ends the watching and nothing else."""
        try:
            if as_json or not show.is_live_terminal():
                self._lines(as_json)
            else:
                self._screens()
        except KeyboardInterrupt:
            show.line("stopped watching; the run goes on", file=sys.stderr)
            return
        for subject, watcher in self._watched:
            status = watcher.look().status
            how = status.state.value if status is not None else "no word of a sidecar"
            show.line(f"run {subject.run_id} has ended: {how}", file=sys.stderr if as_json else None)

    def look(self) -> list[tuple[Subject, Figures, bool]]:
        """Each run, its figures, and whether it lives."""
        # Asked before the look: what a run says last is then in it.
        alive = [subject.is_alive for subject, _ in self._watched]
        return [(s, w.look(), lives) for (s, w), lives in zip(self._watched, alive, strict=True)]

    def _screens(self) -> None:
        with Live(console=show.console(), auto_refresh=False) as live:
            while True:
                found = self.look()
                live.update(frame(found), refresh=True)
                if not any(alive for *_, alive in found):
                    return
                time.sleep(self._every_s or REFRESH_S)

    def _lines(self, as_json: bool) -> None:
        while True:
            found = self.look()
            for subject, figures, alive in found:
                text = json.dumps(as_object(subject, figures, alive)) if as_json else _stamped(subject, figures, alive)
                try:
                    print(text, flush=True)
                except OSError:
                    # The reader is gone, and with it the reason to go on.
                    show.give_up(sys.stdout)
                    return
            if not any(alive for *_, alive in found):
                return
            time.sleep(self._every_s or LINE_EVERY_S)


def frame(found: Sequence[tuple[Subject, Figures, bool]]) -> RenderableType:
    """What stands on the terminal."""
    parts: list[RenderableType] = []
    for subject, figures, alive in found:
        parts += [show.grid(screen.rows(subject, figures, alive=alive)), Text("")]
    clock = time.strftime("%H:%M:%S")
    return Group(*parts, Text(f"{clock}   Ctrl-C stops watching; the run goes on", style="dim"))


def as_object(subject: Subject, figures: Figures, alive: bool) -> dict[str, Any]:
    """One run as a JSON object."""
    status = figures.status
    return {
        "t": time.time(),
        "run_id": subject.run_id,
        "run_dir": str(subject.run_dir),
        "alive": alive,
        "status": status.to_json() if status is not None else None,
        "figures": figures.to_json(),
    }


def _stamped(subject: Subject, figures: Figures, alive: bool) -> str:
    return f"{time.strftime('%H:%M:%S')} {screen.one_line(subject, figures, alive=alive)}"

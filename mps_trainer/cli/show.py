"""How things look on a terminal. Text of the user's is never read as markup.

A reader that is gone (`| head`, a closed terminal) or a full disk behind our output changes nothing of what a command
does, nor its exit status.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mps_trainer.errors import MpsTrainerError
from mps_trainer.launcher.doctor import Check, Level
from mps_trainer.launcher.runs import RunView

_LEVEL_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich's own ends the process here, in the middle of whatever it was doing.
        give_up(self.file)


def _print(what: RenderableType, file: TextIO | None = None) -> None:
    file = file or sys.stdout
    try:
        # Made at each use: tests replace sys.stdout.
        _Console(file=file, highlight=False, soft_wrap=True).print(what)
    except OSError:
        give_up(file)


def give_up(file: IO[str]) -> None:
    """Send what is still to come for `file` nowhere; Python's own flush at exit would fail and change the status."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def line(text: str = "", *, style: str = "", file: TextIO | None = None) -> None:
    """One line as it is."""
    _print(Text(text, style=style), file)


def raw(chunk: bytes) -> None:
    """Bytes of another program on stdout; OSError when nobody takes them, and later ones go nowhere."""
    try:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    except OSError:
        give_up(sys.stdout)
        raise


def progress(text: str) -> None:
    """What happens now; on stderr, so that stdout stays for results."""
    line(f"- {text}", style="dim", file=sys.stderr)


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """A moving bar on a terminal, with what happens now and for how long; nothing where stderr is no terminal.

    What is told as "... 3 of 20 ..." moves the bar.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    layout = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*layout, console=_Console(file=sys.stderr), transient=True) as progress:
        bar = progress.add_task("", total=None)

        def tell(text: str) -> None:
            match = re.search(r"(\d+) of (\d+)", text)
            done, total = (int(match[1]), int(match[2])) if match else (None, None)
            progress.update(bar, description=text, completed=done, total=total)

        yield tell


def error(problem: MpsTrainerError) -> None:
    """An error of ours: what was found, then what to do."""
    line(f"mps-trainer: {problem.message}", style="bold red", file=sys.stderr)
    if problem.todo:
        line(f"  What to do: {problem.todo}", file=sys.stderr)


def diff(text: str) -> None:
    """A unified diff in its usual colours."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for item in text.splitlines():
        line(item, style=styles.get(item[:1], ""))


def checks(found: Iterable[Check]) -> None:
    """What the doctor found."""
    for check in found:
        text = Text.assemble((f"{check.level.value:8}", _LEVEL_STYLES[check.level]), f"{check.name}: {check.found}")
        _print(text)
        if check.todo:
            line(f"{'':8}  What to do: {check.todo}")


def run_table(views: Iterable[RunView]) -> None:
    """Live runs, one a row."""
    table = Table(box=None, pad_edge=False)
    for title in ("run", "state", "device", "mps", "version", "experiences", "loss", "auc", "restarts", "config"):
        table.add_column(title, overflow="fold")
    for view in views:
        status = view.status
        numbers = (
            ("-",) * 5
            if status is None
            else (
                str(status.version),
                str(status.experiences),
                _number(status.loss),
                _number(status.auc),
                str(status.restarts),
            )
        )
        state = status.state.value if status else "starting"
        row = (view.record.run_id, state, view.record.device, view.record.mps, *numbers, view.record.config)
        table.add_row(*(Text(cell) for cell in row))
    _print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

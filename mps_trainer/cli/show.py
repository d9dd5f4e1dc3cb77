"""How things look on a terminal. Text of the user's is never read as markup.

A reader that is gone (`| head`, a closed terminal) or a full disk behind our output changes nothing of what a command
does, nor its exit status.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mps_trainer.cli.screen import LABEL_WIDTH, Row
from mps_trainer.errors import MpsTrainerError
from mps_trainer.launcher.doctor import Check, Level

#: Between two lines of progress where there is no terminal: a log wants few.
_LINE_S = 10.0
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


def hanging(text: str, indent: int) -> None:
    """One line; on a narrow terminal it goes on below itself, `indent` columns in, broken between words only."""
    if not sys.stdout.isatty():
        line(text)
        return
    wrapper = textwrap.TextWrapper(
        console().width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    for part in text.splitlines():
        # A path is left whole, and beside its label: it is there to be copied.
        alone = len(part[indent:].split()) == 1
        line(part if alone else "\n".join(wrapper.wrap(part)))


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
    """A moving bar on a terminal, with what happens now and for how long; elsewhere a line now and then.

    What is told as "... 3 of 20 ..." moves the bar.
    """
    if not sys.stderr.isatty():
        last = time.monotonic()

        def say(text: str) -> None:
            nonlocal last
            if time.monotonic() - last >= _LINE_S:
                last = time.monotonic()
                progress(text)

        yield say
        return
    layout = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*layout, console=_Console(file=sys.stderr), transient=True) as shown:
        bar = shown.add_task("", total=None)

        def tell(text: str) -> None:
            match = re.search(r"(\d+) of (\d+)", text)
            done, total = (int(match[1]), int(match[2])) if match else (None, None)
            shown.update(bar, description=text, completed=done, total=total)

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


def console() -> Console:
    """Of what is stdout now: tests replace it."""
    return _Console(file=sys.stdout, highlight=False)


def is_live_terminal() -> bool:
    """Whether stdout can show a screen that changes."""
    found = console()
    return found.is_terminal and not found.is_dumb_terminal


def grid(found: Iterable[Row]) -> Table:
    """Labels and texts in two columns; a long text goes on below itself."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=LABEL_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    for label, text, style in found:
        table.add_row(Text(label, style="dim"), Text(_printable(text), style=style))
    return table


def rows(found: Iterable[Row]) -> None:
    """The same printed: wrapped on a terminal; elsewhere one line each, however long."""
    if not sys.stdout.isatty():
        for label, text, _ in found:
            line(_printable(f"{label:{LABEL_WIDTH}}  {text}".rstrip()))
        return
    try:
        console().print(grid(found))
    except OSError:
        give_up(sys.stdout)


def _printable(text: str) -> str:
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)

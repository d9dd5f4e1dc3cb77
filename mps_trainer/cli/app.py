"""The commands and how their errors look."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import mps_trainer
from mps_trainer.cli import bench, look, runs, show, workbench
from mps_trainer.errors import MpsTrainerError
from mps_trainer.launcher.verdict import EXIT_BAD_CONFIG, EXIT_INTERRUPTED

EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h; none of the codes that `run` gives a meaning

_HELP = """\
Train a small auxiliary model beside vLLM, fed by a Trinity-RFT run.

Settings live in your Trinity YAML, in the args of the operator mps_trainer.operator.AuxTrainer.

\b
  mps-trainer run trinity.yaml     everything: sidecar, Ray, trinity run
  mps-trainer plan trinity.yaml    what that would do, and nothing else
  mps-trainer up trinity.yaml      only the sidecar; the rest is yours
  mps-trainer new-task my_filter   a task of your own to start from
"""


class _FriendlyGroup(TyperGroup):
    """Our own errors are messages and not tracebacks, unless --debug asks for more."""

    # Any, because newer versions of typer bring a click of their own.
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MpsTrainerError as error:
            if ctx.params.get("debug"):
                raise
            show.error(error)
            ctx.exit(EXIT_BAD_CONFIG)
        except KeyboardInterrupt:
            show.line("mps-trainer: interrupted", file=sys.stderr)
            ctx.exit(EXIT_INTERRUPTED)


app = typer.Typer(
    name="mps-trainer",
    cls=_FriendlyGroup,
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        show.line(f"mps-trainer {mps_trainer.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What holds for all commands."""


# In the order of --help: what everybody types first.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(runs.run)
app.command()(look.plan)
app.command()(runs.up)
app.command()(runs.down)
app.command()(look.status)
app.command()(look.report)
app.command("new-task")(workbench.new_task)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(workbench.record)
app.command("check-task")(workbench.check_task)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench.bench)
app.command()(look.doctor)


def _open_standard_descriptors() -> None:
    """After `mps-trainer up x.yaml 2>&-` the next file would get descriptor 2, and a child's own stderr its place."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    # Python has no object for a stream that was closed when it started.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def run(argv: Sequence[str]) -> int:
    """Run the command line; the exit code."""
    _open_standard_descriptors()
    try:
        app(args=list(argv), prog_name="mps-trainer")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except Exception as error:
        if "--debug" in argv:
            raise
        show.line(f"mps-trainer: a bug: {type(error).__name__}: {error}", file=sys.stderr)
        show.line("  What to do: run it again as `mps-trainer --debug ...` and report what it prints", file=sys.stderr)
        return EXIT_BUG
    return 0

"""up, run, down: the commands that start and end things."""

from __future__ import annotations

import os
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mps_trainer.cli import show
from mps_trainer.errors import RunError
from mps_trainer.launcher.leftovers import remove_leftovers
from mps_trainer.launcher.process import Ended
from mps_trainer.launcher.run_trinity import TrinityOptions, run_trinity
from mps_trainer.launcher.runs import RunView, end_runs, select_runs
from mps_trainer.launcher.up import RunHandle, prepare, start_run
from mps_trainer.launcher.verdict import EXIT_OK
from mps_trainer.run import State

ConfigArgument = Annotated[Path, typer.Argument(help="Your Trinity YAML.", metavar="CONFIG")]


class Ray(str, Enum):
    """Which Ray to use."""

    AUTO = "auto"
    PRIVATE = "private"
    EXISTING = "existing"


def up(config: ConfigArgument) -> None:
    """Start the sidecar and wait until it is ready.

    You start Ray and trinity run yourself.

    Writes <name>.mps.yaml beside CONFIG (CONFIG itself is never changed) and prints the commands that follow.
    Ends with `mps-trainer down`, or ten minutes (idle_timeout) after the last operator.

    Example: mps-trainer up trinity.yaml
    """
    prepared = prepare(config)
    if prepared.plan is None:
        show.line(f"enabled is false in {config}: nothing to start. Run: trinity run --config {config}")
        return
    for reason in prepared.plan.reasons:
        show.hanging(reason, 2)
    started = time.monotonic()
    run = start_run(prepared, progress=show.progress)
    show.line()
    show.diff(run.derived.diff)
    show.line()
    waits = ", waiting for its first rollout engine" if run.status().state is State.WAITING else ""
    show.line(f"READY after {time.monotonic() - started:.1f} s: run {run.record.run_id}{waits}", style="bold green")
    _show_what_follows(config, run)


def _show_what_follows(config: Path, run: RunHandle) -> None:
    folder = Path(__file__).resolve().parents[2] / "scripts"
    stop = f"{folder / 'stop_mps.sh'}" if (folder / "stop_mps.sh").exists() else "mps-trainer down"
    show.line("Next:")
    for name, value in run.ray_environment.items():
        show.line(f"  export {name}={value}")
        show.line("                                # join: env: in the shell of `ray start`, and before it")
    if run.ray_environment or not os.environ.get("RAY_ADDRESS"):
        show.line("  ray start --head              # from this venv, unless a Ray of yours runs already;")
        show.line("                                # with more than one Ray, export RAY_ADDRESS=<host>:<port> too")
    show.line(f"  trinity run --config {_short(run.derived.path)}")
    show.line(f"  mps-trainer status            # or look at {_short(run.run_dir)}")
    show.line(f"  {stop} {config}")


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def run(
    context: typer.Context,
    config: ConfigArgument,
    ray: Annotated[
        Ray, typer.Option(help="auto: the Ray that runs, else a private one that ends with the run.")
    ] = Ray.AUTO,
) -> None:
    """Sidecar, Ray, trinity run, everything down.

    What follows -- goes to trinity run. The exit status is the truth, although trinity run exits 0 on most failures:

    \b
      0    all well
      1    trinity run failed
      2    the config or its use is wrong, or the sidecar did not start
      3    trinity run finished, but the sidecar failed or was fed nothing
      130  interrupted

    Example: mps-trainer run trinity.yaml --ray private -- --plugin-dir my_plugins
    """
    prepared = prepare(config)
    for reason in prepared.plan.reasons if prepared.plan else ():
        show.hanging(reason, 2)
    options = TrinityOptions(
        sink=show.raw,
        progress=show.progress,
        extra_args=context.args,
        ray=ray.value,
    )
    verdict = run_trinity(prepared, options)
    for note in verdict.notes:
        show.line(note)
    for reason in verdict.reasons:
        show.line(f"mps-trainer: {reason}", style="bold red", file=sys.stderr)
    if verdict.exit_code == EXIT_OK:
        show.line("OK", style="bold green")
    raise typer.Exit(verdict.exit_code)


def down(
    what: Annotated[
        str | None,
        typer.Argument(help="A run id or a config; all runs of yours when left out.", metavar="[RUN|CONFIG]"),
    ] = None,
) -> None:
    """End runs in order and remove what they used.

    The sidecar takes what is in the rings, trains on it and saves a checkpoint first.
    Exit status 1 when something is still alive after the limit.

    Example: mps-trainer down trinity.yaml
    """
    try:
        runs = select_runs(what)
    except RunError:
        # A script that stops a run must not fail because the run has ended by itself.
        if what is None or not Path(what).exists():
            raise
        runs = []
    if not runs:
        removed = remove_leftovers()
        cleaned = f"; {len(removed)} leftovers of dead runs removed" if removed else ""
        show.line(f"no live run{f' of {what}' if what else ''}{cleaned}")
        return
    ended = end_runs(runs, progress=show.progress)
    for run, item in zip(runs, ended, strict=True):
        show.line(f"run {item.run_id}: {item.how.value}; results in {item.run_dir}")
        if item.how is Ended.STILL_ALIVE:
            _show_how_to_end(run)
    if any(item.how is Ended.STILL_ALIVE for item in ended):
        raise typer.Exit(1)


def _show_how_to_end(run: RunView) -> None:
    todo = (
        f"see supervisor.log and sidecar.log in {run.record.run_dir}, then `mps-trainer down {run.record.run_id}` again"
    )
    if run.supervisor is not None:
        pid = run.supervisor.pid
        todo += f"; after `kill -KILL {pid}` (its supervisor) the sidecar ends in order by itself"
    show.line(f"  What to do: {todo}", file=sys.stderr)

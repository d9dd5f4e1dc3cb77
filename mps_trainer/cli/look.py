"""status, plan, doctor, report: the commands that only look."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mps_trainer.cli import show
from mps_trainer.cli.runs import ConfigArgument
from mps_trainer.config import Settings, format_size
from mps_trainer.launcher.doctor import Level, run_checks
from mps_trainer.launcher.leftovers import remove_leftovers
from mps_trainer.launcher.runs import list_runs, select_runs
from mps_trainer.launcher.up import prepare
from mps_trainer.run import State, Status, is_run_alive

_SIZES = ("memory", "ring_slot")


def status(
    what: Annotated[
        str | None, typer.Argument(help="A run id, a config or a run folder.", metavar="[RUN|CONFIG|FOLDER]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show live runs, or what a run folder says.

    Example: mps-trainer status
    """
    if what is not None and Path(what).is_dir():
        _print_status(Status.load(Path(what)))
        return
    views = select_runs(what) if what is not None else list_runs()
    if as_json:
        known = [{**asdict(view.record), "status": asdict(view.status) if view.status else None} for view in views]
        show.line(json.dumps(known, indent=2))
    elif not views:
        show.line("no live run")
    else:
        show.run_table(views)
        for view in views:
            if view.status:
                _print_trouble(view.record.run_id, view.record.run_dir, view.status)


def _print_trouble(run_id: str, run_dir: str, found: Status) -> None:
    if found.error:
        show.line(f"run {run_id}: {found.error}", style="yellow")
    if found.trouble:
        show.line(f"run {run_id}: {found.trouble}", style="yellow")
    if found.ring_registered is False:
        slow = "ring_registered is False, so batches reach the GPU slowly; sidecar.log says what to raise"
        show.line(f"run {run_id}: {slow}", style="yellow")
    if found.state is State.WAITING:
        show.line(f"run {run_id}: waiting for the first rollout engine, imports done")
    if found.last_death and found.last_death not in found.error:
        show.line(f"run {run_id}: before its last restart: {found.last_death}", style="yellow")
    if found.set_aside:
        show.line(f"run {run_id}: {found.set_aside} experiences are set aside in {run_dir}/set_aside", style="yellow")
    if found.damaged_records:
        damaged = f"{found.damaged_records} damaged stretches of the journal were skipped and are kept"
        show.line(f"run {run_id}: {damaged} in {run_dir}/journal", style="yellow")


def _print_status(found: Status) -> None:
    state = found.state.value
    # A killed run has said nothing of its end; these two states say it.
    if found.state not in (State.STOPPED, State.FAILED) and not is_run_alive(found.run_id):
        state += " (not running)"
    for key, value in asdict(found).items():
        show.line(f"{key}: {state if key == 'state' else value}")


def plan(config: ConfigArgument) -> None:
    """Print what would happen; start nothing.

    The resolved settings, the placement with its reasons, and what the derived config changes.

    Example: mps-trainer plan trinity.yaml
    """
    prepared = prepare(config)
    show.line("settings (of the operator's args; * differs from the default)", style="bold")
    _print_settings(prepared.settings)
    show.line()
    if prepared.plan is None:
        show.line(f"enabled is false: nothing would start. Run: trinity run --config {config}")
        return
    show.line("placement", style="bold")
    for reason in prepared.plan.reasons:
        show.line(f"  {reason}")
    show.line(f"  run folders: {prepared.config.runs_dir}")
    show.line()
    derived = prepared.derived(Path("<set at start>"))
    show.line(f"derived config: {derived.path}", style="bold")
    show.diff(derived.diff)


def _print_settings(settings: Settings) -> None:
    defaults = Settings().dump()
    for key, value in settings.dump().items():
        mark = " " if value == defaults[key] else "*"
        show.line(f"{mark} {key}: {_setting(key, value)}")


def _setting(key: str, value: Any) -> str:
    if key in _SIZES and value is not None:
        return format_size(value)
    return value if isinstance(value, str) else json.dumps(value)


def doctor(
    clean: Annotated[bool, typer.Option("--clean", help="Remove what dead runs left, and nothing else.")] = False,
) -> None:
    """Check this machine and this venv.

    Starts nothing. Exit status 1 when something would stop a run.

    Example: mps-trainer doctor --clean
    """
    if clean:
        for item in remove_leftovers():
            show.line(f"removed {item.path} ({format_size(item.num_bytes)}, run {item.run_id})")
    found = run_checks()
    show.checks(found)
    if any(check.level is Level.PROBLEM for check in found):
        raise typer.Exit(1)


def report(
    run_dir: Annotated[Path, typer.Argument(help="A run folder; `latest` is a link to the newest.", metavar="RUN_DIR")],
    png: Annotated[Path | None, typer.Option(help="Where the picture goes; default: report.png in RUN_DIR.")] = None,
) -> None:
    """Summarise a run from its files and draw it.

    Example: mps-trainer report ckpt/lab/run.mps-trainer/latest
    """
    # Only this command needs it, and it may bring matplotlib.
    from mps_trainer.report import describe, plot, summarize

    for label, text in describe(summarize(run_dir)):
        show.line(f"{label:12} {text}")
    picture = png or run_dir / "report.png"
    plot(run_dir, picture)
    show.line(f"{'picture':12} {picture}")

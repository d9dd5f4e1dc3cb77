"""status, plan, doctor, report: the commands that only look."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mps_trainer.cli import screen, show
from mps_trainer.cli.find_run import find_run_dir
from mps_trainer.cli.runs import ConfigArgument
from mps_trainer.cli.screen import Subject
from mps_trainer.cli.watch import Watch, as_object
from mps_trainer.config import Settings, format_size, show_setting
from mps_trainer.errors import RunError
from mps_trainer.launcher.doctor import Level, run_checks
from mps_trainer.launcher.leftovers import remove_leftovers
from mps_trainer.launcher.runs import RunView, select_runs
from mps_trainer.launcher.up import prepare


def status(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A run id, a config or a run folder, also of an ended run; live runs without it.",
            metavar="[RUN|CONFIG|FOLDER]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON; with --watch a line each.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on looking until the run ends, or Ctrl-C.")] = False,
    every: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds between two looks; default: 1, and 5 where stdout is no terminal."),
    ] = None,
) -> None:
    """Show live runs, or what a run folder says.

    docs/watching.md says what each figure means.

    Example: mps-trainer status --watch
    """
    views, subjects = _meant(what)
    if watch and subjects:
        Watch(subjects, every).run(as_json=as_json)
    elif as_json:
        show.line(json.dumps(_as_json(views, subjects), indent=2))
    elif not subjects:
        show.line("no live run")
    else:
        for i, (subject, figures, alive) in enumerate(Watch(subjects).look()):
            if i:
                show.line()
            show.rows(screen.rows(subject, figures, alive=alive))


def _meant(what: str | None) -> tuple[list[RunView], list[Subject]]:
    """Live runs, or the one run of a folder, or of a config that has no live run: its newest, as in `report`."""
    if what is None or not Path(what).is_dir():
        try:
            views = select_runs(what)
        except RunError:
            if what is None or not Path(what).is_file():
                raise
        else:
            return views, [Subject.of_run(view.record) for view in views]
    return [], [Subject.of_folder(find_run_dir(what, show.progress))]


def _as_json(views: list[RunView], subjects: list[Subject]) -> list[dict[str, Any]]:
    records = {view.record.run_id: asdict(view.record) for view in views}
    return [{**records.get(found[0].run_id, {}), **as_object(*found)} for found in Watch(subjects).look()]


def plan(config: ConfigArgument) -> None:
    """Print what would happen; start nothing.

    The resolved settings, the placement with its reasons, and what the derived config changes.

    Example: mps-trainer plan trinity.yaml
    """
    prepared = prepare(config)
    show.line("settings (of the operator's args; * is not the default: set by you, or decided here)", style="bold")
    _print_settings(prepared.settings)
    show.line()
    if prepared.plan is None:
        show.line(f"enabled is false: nothing would start. Run: trinity run --config {config}")
        return
    show.line("placement", style="bold")
    for reason in prepared.plan.reasons:
        show.hanging(f"  {reason}", 4)
    show.line(f"  run folders: {prepared.config.runs_dir}")
    show.line()
    derived = prepared.derived(Path("<set at start>"))
    show.line(f"derived config: {derived.path}", style="bold")
    show.diff(derived.diff)


def _print_settings(settings: Settings) -> None:
    defaults = Settings().dump()
    for key, value in settings.dump().items():
        mark = " " if value == defaults[key] else "*"
        show.hanging(f"{mark} {key}: {show_setting(key, value)}", 4)


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
    what: Annotated[
        str, typer.Argument(help="A run folder or one above it, a config, or the id of a live run.", metavar="RUN")
    ],
    html: Annotated[Path | None, typer.Option(help="Where the page goes; default: report.html in the folder.")] = None,
    png: Annotated[Path | None, typer.Option(help="Where the picture goes; default: report.png in the folder.")] = None,
) -> None:
    """Summarise a run and draw it, as one HTML page.

    The page needs no network and no other file. Needs matplotlib: pip install -e '.[report]' in the clone.

    Example: mps-trainer report ckpt/lab/run.mps-trainer/latest
    """
    # Only this command needs it, and it may bring matplotlib.
    from mps_trainer.report import describe, plot, summarize, write_page

    run_dir = find_run_dir(what, show.progress)
    found = summarize(run_dir)
    for label, text in describe(found):
        show.hanging(f"{label:12} {text}", 13)
    if found.batches:
        try:
            show.line(f"{'picture':12} {plot(run_dir, png or run_dir / 'report.png')}")
        except RunError as error:
            # metrics.jsonl is lost; the rest is told all the same.
            show.line(f"{'picture':12} none: {error.message}")
    show.line(f"{'page':12} {write_page(run_dir, html or run_dir / 'report.html')}")

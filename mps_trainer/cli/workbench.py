"""new-task, check-task, record: the commands of whoever writes a task."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mps_trainer.cli import show
from mps_trainer.cli.runs import ConfigArgument, Ray
from mps_trainer.config import format_size
from mps_trainer.errors import ConfigError
from mps_trainer.launcher.record_run import record_run
from mps_trainer.launcher.run_trinity import TrinityOptions
from mps_trainer.launcher.verdict import EXIT_OK

if TYPE_CHECKING:
    from mps_trainer.workbench.check import CheckReport


def new_task(
    name: Annotated[str, typer.Argument(help="The module's name, such as outlier_filter.", metavar="NAME")],
    folder: Annotated[Path, typer.Option(help="Where the two files go.")] = Path("."),
) -> None:
    """Write a task that works, and its test, to change.

    Example: mps-trainer new-task my_filter
    """
    # Only these commands need the workbench.
    from mps_trainer.workbench.new_task import new_task

    task, test, title = new_task(name, folder)
    show.line(f"wrote {task}   the task: change what stands behind CHANGE")
    show.line(f"wrote {test}   its test: python -m pytest {test}")
    show.line()
    show.line("Into the args of mps_trainer.operator.AuxTrainer in your Trinity YAML:")
    show.line(f'  task: "{name}:{title}"')
    show.line("  use: filter")
    show.line("  filter: {drop: quantile, value: 0.05}")
    show.line("Next (in the folder of the task):")
    show.line("  mps-trainer record trinity.yaml --to experiences.jsonl   # experiences of your own run, to try it on")
    show.line(f"  mps-trainer check-task {name}:{title} --data experiences.jsonl")


def record(
    context: typer.Context,
    config: ConfigArgument,
    to: Annotated[Path, typer.Option(help="The new file, JSON lines.", show_default=False)],
    most: Annotated[int, typer.Option("--max", min=1, help="Experiences to record, at most.")] = 2000,
    ray: Annotated[
        Ray, typer.Option(help="auto: the Ray that runs, else a private one that ends with the run.")
    ] = Ray.AUTO,
) -> None:
    """Run Trinity and record what the operator sees.

    `trinity run` on your YAML without a sidecar; every experience passes untouched and is appended to a file.
    What follows -- goes to trinity run; it goes on to its own end. Ctrl-C ends it, and what was recorded stays.
    The exit status is that of `mps-trainer run`.

    Example: mps-trainer record trinity.yaml --to experiences.jsonl --max 2000
    """
    options = TrinityOptions(sink=show.raw, progress=show.progress, extra_args=context.args, ray=ray.value)
    verdict, count = record_run(config, to, most, options)
    for note in verdict.notes:
        show.line(note)
    for reason in verdict.reasons:
        show.line(f"mps-trainer: {reason}", style="bold red", file=sys.stderr)
    show.line(f"recorded {count} experiences in {to}")
    if count:
        show.line(f"Next: mps-trainer check-task TASK --data {to}")
    if verdict.exit_code == EXIT_OK:
        show.line("OK", style="bold green")
    raise typer.Exit(verdict.exit_code)


def check_task(
    task: Annotated[str, typer.Argument(help='A built-in task, or "my_module:MyTask".', metavar="TASK")],
    data: Annotated[
        Path | None, typer.Option(help="Experiences that `record` has written; made-up ones without it.")
    ] = None,
    task_args: Annotated[str, typer.Option(help="The task's arguments, as JSON.")] = "{}",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:<n>; always outside MPS.")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1, max=2**24, help="Experiences in one step.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Training steps on the recorded experiences.")] = 200,
) -> None:
    """Try a task alone: does it work, learn, what does it cost.

    Trains and scores on the worst batches that its columns allow, then on recorded experiences with a tenth of them
    held out, and prints the `memory:` to ask for. Exit status 2 when the task cannot work.

    Example: mps-trainer check-task my_filter:MyFilter --data experiences.jsonl
    """
    arguments = _json(task_args)
    with show.steps() as tell:
        # Behind the bar, because torch takes its time to load.
        tell("loading torch")
        from mps_trainer.workbench.check import CheckOptions, check_task

        report = check_task(CheckOptions(task, data, arguments, device, batch_size, steps), tell)
    _print_report(task, report, batch_size)
    _print_what_follows(task, arguments, report)


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--task-args is no JSON: {error}", "write it like '{\"feature_dim\": 3584}'") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--task-args is {found!r}", "write it like '{\"feature_dim\": 3584}'")
    return found


def _print_report(task: str, report: CheckReport, batch_size: int) -> None:
    from mps_trainer.workbench.check import SCORED, describe_column
    from mps_trainer.workbench.operations import BESIDE_ENGINE_MS

    trial = report.trial
    rows = [("task", f"{task} on {report.device}, outside MPS")]
    rows += [("column", describe_column(column)) for column in report.columns]
    if report.extraction is not None and report.recording is not None:
        found, batches = report.extraction, len(report.recording.batches)
        rows.append(("experiences", f"{found.size} of {found.seen} can be fed, from {batches} batches"))
    rows.append(
        (
            "worst batch",
            f"{trial.steps} steps of up to {batch_size}, made up: median {trial.step_ms:.1f} ms, longest "
            f"{trial.longest_step_ms:.1f} ms; no NaN in loss, gradients, scores",
        )
    )
    rows += _learning(report, batch_size)
    rows.append(("score", f"{SCORED} experiences in {report.score_ms:.1f} ms"))
    beside = report.step_operations * BESIDE_ENGINE_MS / 1e3
    rows.append(
        (
            "operations",
            f"{report.step_operations:,} in a step (about {beside:.2g} s beside a busy engine, however small they "
            f"are), {report.score_operations:,} in a scoring pass",
        )
    )
    if trial.longest_kernel:
        rows.append(("kernel", f"the longest takes {trial.longest_kernel_ms:.2f} ms"))
    what = "reserved by PyTorch on the GPU" if report.device != "cpu" else "growth of this process on the CPU"
    rows.append(("memory", f"{format_size(trial.peak)} at the most ({what})"))
    for label, text in rows:
        show.line(f"{label:12} {text}")
    for warning in report.warnings:
        show.line(f"{'warning':12} {warning}", style="yellow")


def _learning(report: CheckReport, batch_size: int) -> list[tuple[str, str]]:
    learnt = report.learnt
    if learnt is None:
        return [("note", "no --data: made-up batches only, so nothing is said about what it learns")]
    median, p95 = _quantiles(learnt.step_ms[1:] or learnt.step_ms)
    size = min(batch_size, learnt.trained_on)
    steps, passes = len(learnt.losses), len(learnt.losses) * size / learnt.trained_on
    rows = [
        (
            "step",
            f"median {median:.1f} ms, p95 {p95:.1f} ms; {steps} steps of {size}, {passes:.0f} times through the data",
        ),
        ("loss", f"{learnt.first_loss:.4f} first, {learnt.last_loss:.4f} last (means of a tenth of the steps)"),
    ]
    if learnt.auc is not None and learnt.auc_before is not None:
        text = f"{learnt.auc_before:.3f} untrained, {learnt.auc:.3f} trained, on {learnt.held_out} experiences held out"
        rows.append(("auc", text))
    scores = learnt.scores
    rows.append(("scores", f"{scores.min():.4g} to {scores.max():.4g}, mean {scores.mean():.4g}, held out"))
    return rows


def _quantiles(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _print_what_follows(task: str, arguments: dict[str, Any], report: CheckReport) -> None:
    from mps_trainer.workbench.check import memory_line

    show.line()
    show.line("Into the operator's args:", style="bold")
    show.line(f'  task: "{task}"')
    if arguments:
        show.line(f"  task_args: {json.dumps(arguments)}")
    on_cpu = report.device == "cpu"
    show.line(
        f"  {memory_line(report.memory)}" + ("   # measured on the CPU; check on a GPU as well" if on_cpu else "")
    )

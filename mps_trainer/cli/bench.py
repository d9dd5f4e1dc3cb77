"""`mps-trainer bench`: the benchmark that compares every way of training beside a rollout."""

from __future__ import annotations

import shlex
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from mps_trainer.cli import show
from mps_trainer.errors import ConfigError
from mps_trainer.launcher.verdict import EXIT_OK

_WRONG = 1


def bench(context: typer.Context) -> None:
    """Measure what the rollout loses and the trainer gains.

    Flags are those of scripts/benchmark.py (`mps-trainer bench -- --help`, docs/benchmark.md). Without a GPU a tiny
    engine stands in for vLLM. The exit status is 1 when an arm's outputs are wrong.

    Example: mps-trainer bench --rounds 5 --budget-s 1200 --out results/mine
    """
    raise typer.Exit(run(context.args, "mps-trainer bench"))


def run(argv: Sequence[str], prog: str) -> int:
    """Plan, run, write; the exit status."""
    # Heavy, and no other command needs it.
    from mps_trainer.bench import options as flags

    options = flags.parse(argv, prog)
    from mps_trainer.bench import page, picture
    from mps_trainer.bench.run import prepare, right
    from mps_trainer.bench.run import run as run_benchmark

    benchmark = prepare(options)
    for line in benchmark.lines:
        show.line(line)
    if options.plan:
        return EXIT_OK
    with _work_dir(options.work_dir) as folder, _sigterm_as_interrupt(), show.steps() as tell:
        results = run_benchmark(benchmark, folder, tell, f"{prog} {shlex.join(argv)}".rstrip())
    show.raw(page.page(results).encode())
    if options.out is not None:
        png = options.out.with_name(f"{options.out.name}.png")
        try:
            picture.draw(results["sessions"], _subtitle(results), png)
        except ConfigError as error:
            show.error(error)
        show.line(f"wrote {', '.join(map(str, page.write(results, options.out)))}")
    return EXIT_OK if right(results) else _WRONG


def _subtitle(results: dict[str, object]) -> str:
    machine = results["machine"]
    assert isinstance(machine, dict)
    where = machine.get("GPU", f"no GPU, {machine['Cores']} cores, a tiny engine stands in for vLLM")
    return f"{where}; dots: medians, lines: min to max"


@contextmanager
def _work_dir(named: Path | None) -> Iterator[Path]:
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
        yield named.absolute()
        return
    # Short: the sockets of an MPS daemon lie in it.
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as folder:
        yield Path(folder)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """So that everything that was started is ended."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

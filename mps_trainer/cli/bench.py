"""`mps-trainer bench`: the benchmark that compares every way of training beside a rollout."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from mps_trainer.cli import show
from mps_trainer.errors import ConfigError
from mps_trainer.launcher.verdict import EXIT_OK

if TYPE_CHECKING:
    from mps_trainer.bench.saved import Saved

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
    from mps_trainer.bench.page import page
    from mps_trainer.bench.run import prepare, right
    from mps_trainer.bench.run import run as run_benchmark
    from mps_trainer.bench.saved import Saved
    from mps_trainer.bench.work_dir import work_dir

    benchmark = prepare(options)
    for line in benchmark.lines:
        show.line(line)
    if options.plan:
        return EXIT_OK
    saved = Saved(options.out) if options.out is not None else None
    keep = saved.keep if saved is not None else lambda _: None
    with _signals_as_interrupt(), work_dir(options.work_dir) as folder:
        with show.steps() as tell:
            results = run_benchmark(benchmark, folder, tell, f"{prog} {shlex.join(argv)}".rstrip(), keep)
        written = _save(saved, results) if saved is not None else []
    # Nobody may be there to read it, after the terminal was closed.
    with suppress(OSError):
        show.raw(page(results).encode())
    if written:
        show.line(f"wrote {', '.join(map(str, written))}")
    return EXIT_OK if right(results) else _WRONG


def _save(saved: Saved, results: dict[str, Any]) -> list[Path]:
    """JSON, then Markdown, then what takes long and may fail."""
    from mps_trainer.bench import picture

    with _held_back():
        asked = saved.where
        try:
            written = saved.write(results)
        except OSError as error:
            show.error(ConfigError(f"results can be written nowhere: {error}", "the page and all of it follow"))
            with suppress(OSError):
                show.raw(json.dumps(results).encode() + b"\n")
            return []
        if saved.problem:
            show.error(
                ConfigError(f"--out {asked} cannot be written: {saved.problem}", f"results are in {written[0].parent}")
            )
    try:
        picture.draw(results["sessions"], _subtitle(results), saved.png)
        saved.write_page(results, picture=True)
    except ConfigError as error:
        show.error(error)
    except OSError as error:
        show.error(ConfigError(f"there is no picture: {error}", "make room; the other results are written"))
    return written


def _subtitle(results: dict[str, object]) -> str:
    machine = results["machine"]
    assert isinstance(machine, dict)
    where = machine.get("GPU", f"no GPU, {machine['Cores']} cores, a tiny engine stands in for vLLM")
    return f"{where}; dots: medians, lines: min to max"


def _end_signals() -> list[signal.Signals]:
    """Those that ask for the end; one that is ignored (SIGHUP under nohup) stays so."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in asking if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def _handled(handler: Callable[[int, object], object], numbers: Sequence[signal.Signals]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """So that everything that was started is ended, and what was measured is kept."""

    def interrupt(number: int, _: object) -> NoReturn:
        if number == signal.SIGHUP:
            for stream in (sys.stdout, sys.stderr):
                if stream.isatty():
                    # The terminal is gone; a write to it would fail and cost the results.
                    show.give_up(stream)
        raise KeyboardInterrupt

    with _handled(interrupt, [number for number in _end_signals() if number != signal.SIGINT]):
        yield


@contextmanager
def _held_back() -> Iterator[None]:
    """A second Ctrl-C, while what the first one left is written, is heeded afterwards."""
    asked: list[int] = []
    with _handled(lambda number, _: asked.append(number), _end_signals()):
        yield
    if asked:
        raise KeyboardInterrupt

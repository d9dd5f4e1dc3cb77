"""The whole benchmark: look at the machine, plan, run a session for each task, work out the figures."""

from __future__ import annotations

import os
import platform
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mps_trainer.bench import figures
from mps_trainer.bench.arms import Here, choose, low_variants, variants
from mps_trainer.bench.load import Load, Shape, long_tailed, read_trace
from mps_trainer.bench.options import complete
from mps_trainer.bench.plan import SessionPlan, describe, make_plan
from mps_trainer.bench.saved import require_writable
from mps_trainer.bench.session import INTERRUPTED, Session
from mps_trainer.bench.setting import Setting
from mps_trainer.bench.work import WORKS, find_work
from mps_trainer.bench.work_dir import STATE
from mps_trainer.errors import ConfigError, MpsTrainerError, PlacementError, RunError
from mps_trainer.launcher.machine_facts import installed_version
from mps_trainer.mps.checks import Surroundings, read_surroundings, require_possible, run_checks
from mps_trainer.mps.environment import without_mps
from mps_trainer.mps.nvml import GpuFacts
from mps_trainer.run import STATE_DIR_VARIABLE

Tell = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]
# Of the cores: above it others take part in every window.
_BUSY = 0.3
_NO_GPU = "No GPU: the tiny engine stands in for vLLM. This shows the method, and no speed."
_NOT_FINISHED = "Not finished: this was written amid the benchmark, after a round."
_PACKAGES = ("mps-trainer", "torch", "numpy", "pyarrow", "vllm", "fastapi", "uvicorn")


@dataclass(frozen=True)
class Benchmark:
    """What will run, before it does.

    Attributes:
        gpus: the engines' GPU first; empty on the CPU.
    """

    options: Namespace
    plans: tuple[SessionPlan, ...]
    left_out: dict[str, str]
    gpus: tuple[GpuFacts, ...]
    driver: str

    @property
    def lines(self) -> list[str]:
        """The plan for people, its time first."""
        total = sum(plan.seconds for plan in self.plans)
        budget = self.options.budget_s
        first = (
            f"time: about {total / 60:.1f} min for {len(self.plans)} session(s), the budget is {budget / 60:.1f} min"
        )
        if total > budget:
            first += "; it will end with fewer rounds"
        return [first, *(line for plan in self.plans for line in describe(plan, self.left_out))]


def prepare(options: Namespace, around: Surroundings | None = None, here: Here | None = None) -> Benchmark:
    """Plan everything; starts nothing.

    Args:
        around, here: of this machine; tests give others.

    Raises:
        ConfigError, PlacementError: what the user has to change.
    """
    around = around or read_surroundings()
    gpus = _gpus(options, around)
    here = here or Here.look(len(gpus), _why_no_mps(around, gpus))
    if options.engine == "vllm" and not (here.vllm and gpus):
        raise PlacementError("--engine vllm needs vLLM and a GPU", "install vllm, or use --engine tiny")
    complete(options, vllm=options.engine == "vllm" or (options.engine == "auto" and here.vllm and bool(gpus)))
    tiny = options.engine == "tiny"
    require_writable(options.out, options.work_dir)
    paced = variants(options.pace_variant, options.pace_set)
    low = low_variants(options.low_variant)
    for flag, arms in (("--pace-variant", paced), ("--low-variant", low)):
        if len({arm.name for arm in arms}) < len(arms):
            raise ConfigError(f"two of {flag} have one name: {[arm.name for arm in arms]}", "give each its own")
        if len(arms) > 1 and options.arms is not None and arms[0].name not in options.arms:
            raise ConfigError(f"{flag} varies {arms[0].name}, which --arms does not name", "name it too")
    for arm in paced:
        # Its settings are refused here and not when its sidecar starts, minutes later.
        WORKS["A"].settings(**arm.settings(options.slowdown))
    arms, left_out = choose(options.arms, here, tiny=tiny, instead=[*low, *paced])
    facts = None if tiny else (gpus[0].total, gpus[0].used)
    if not tiny and gpus[0].processes:
        raise PlacementError(
            f"somebody computes on GPU {gpus[0].index}: PIDs {', '.join(str(p.pid) for p in gpus[0].processes)}",
            "end them or name another GPU with --gpu; beside them nothing measured would mean anything",
        )
    faster = 1 if tiny else 4
    works = [
        find_work(name, options.task_args.get(name, {}), options.train_steps, faster=faster) for name in options.tasks
    ]
    together = [[work] for work in works] if options.separate else [works]
    plans = tuple(make_plan(some, arms, loads(options), options, facts) for some in together)
    return Benchmark(options, plans, left_out, () if tiny else gpus, around.nvml.driver)


def loads(options: Namespace) -> list[Load]:
    """The made-up ones, one for each gap, and the recorded one."""
    shape = Shape(
        options.sequences, options.prompt_tokens, options.median_tokens, options.spread, options.longest_tokens
    )
    count = options.rounds * options.batches
    found = [long_tailed(shape, count, gap, options.seed) for gap in options.gap]
    return found + ([_recorded(options.trace)] if options.trace else [])


def _recorded(path: Path) -> Load:
    try:
        return read_trace(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}", "name a file of JSON lines") from None


def run(benchmark: Benchmark, folder: Path, tell: Tell, command: str, keep: Keep = lambda _: None) -> dict[str, Any]:
    """Run all sessions; everything measured, ready for `page.write` and `picture.draw`.

    What has been measured is returned whatever ends the rest: a broken engine, an interruption.

    Args:
        folder: short, for the sockets of an MPS daemon; logs, run folders and the state of its runs go there.
        keep: called with everything so far, after each round.

    Raises:
        MpsTrainerError, KeyboardInterrupt: before anything was measured.
    """
    options = benchmark.options
    os.environ[STATE_DIR_VARIABLE] = str(folder / STATE)
    # Nothing that is started here shall join a daemon of somebody else's.
    environment = without_mps(os.environ)
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    os.environ.update(environment)
    deadline = time.monotonic() + options.budget_s
    results = _Results(benchmark, command)
    for number, plan in enumerate(benchmark.plans):
        if results.sessions and time.monotonic() + plan.seconds - plan.round_s * (plan.rounds - 1) > deadline:
            results.notes.append(f"The budget ended before task {plan.works[0].name}.")
            continue
        session = Session(
            plan, options, Setting(plan, options, folder, benchmark.gpus), deadline, tell,
            lambda: keep(results.document(results.rows(plan, session.found()), finished=False)),  # noqa: B023
        )  # fmt: skip
        error = _end_of(session)
        if error is not None and not session.rounds:
            if not results.sessions and (isinstance(error, KeyboardInterrupt) or plan is benchmark.plans[-1]):
                # Our own TransportError is an OSError too, and says what to do.
                if isinstance(error, OSError) and not isinstance(error, MpsTrainerError):
                    raise RunError(
                        f"nothing was measured: {error}", "make room, or see the logs in --work-dir"
                    ) from error
                raise error
            results.lose(plan, error)
        else:
            results.add(plan, session.found(), error)
        if isinstance(error, KeyboardInterrupt) or session.found()[-1]["failed"] == INTERRUPTED:
            for left in benchmark.plans[number + 1 :]:
                results.lose(left, KeyboardInterrupt())
            break
    return results.document()


def _end_of(session: Session) -> BaseException | None:
    """Run it; what it raised, at its start or its end."""
    try:
        session.run()
    except (MpsTrainerError, OSError, KeyboardInterrupt) as error:
        return error
    return None


class _Results:
    """What has been measured so far."""

    def __init__(self, benchmark: Benchmark, command: str) -> None:
        self._benchmark, self._command = benchmark, command
        self._begin, self._load_before = time.monotonic(), os.getloadavg()[0]
        self.sessions: list[dict[str, Any]] = []
        self.not_run: dict[str, str] = {}
        self.notes = [] if benchmark.gpus else [_NO_GPU]
        if self._load_before > _BUSY * (os.cpu_count() or 1):
            self.notes.append(
                f"The machine was busy with other things (load {self._load_before:.1f} before the start): look at the "
                "spread before you compare two arms, and measure again when it is quiet."
            )

    def add(self, plan: SessionPlan, found: Sequence[dict[str, Any]], error: BaseException | None) -> None:
        """A session that has ended, well or not."""
        for raw in found:
            raw["failed"] = raw["failed"] or ("" if error is None else _why(error))
            task = f"Task {raw['task']}"
            self.notes += [f"{task}: {name} could not be started: {why}" for name, why in raw["not_started"].items()]
            self.notes += [f"{task}: the trainer of arm {name} is out: {why}" for name, why in raw["ended"].items()]
            if raw["failed"]:
                self.notes.append(f"{task} ended early: {raw['failed']}")
        self.sessions += self.rows(plan, found)

    def lose(self, plan: SessionPlan, error: BaseException) -> None:
        """A session of which nothing was measured."""
        for work in plan.works:
            self.not_run[work.name] = _why(error)
            self.notes.append(f"Task {work.name} was not measured: {_why(error)}")

    def rows(self, plan: SessionPlan, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What was measured with the figures made of it."""
        engines = max(1, len(self._benchmark.gpus))
        return [
            {
                **raw, "rows": figures.figures(raw, batch_size=work.batch_size, engines_here=engines),
                "idle": figures.idle_cost(raw["closing"]), "asked": plan.rounds, "batch_size": work.batch_size,
            }
            for work, raw in zip(plan.works, found, strict=True)
        ]  # fmt: skip

    def document(self, more: Sequence[dict[str, Any]] = (), *, finished: bool = True) -> dict[str, Any]:
        """For `page`; `more`: sessions that go on."""
        options = vars(self._benchmark.options)
        return {
            "command": self._command, "machine": machine(self._benchmark), "versions": versions(),
            "finished": finished, "notes": [*self.notes, *([] if finished else [_NOT_FINISHED])],
            "seconds": round(time.monotonic() - self._begin, 1),
            "load_average": [round(self._load_before, 1), round(os.getloadavg()[0], 1)],
            "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
            "left_out": self._benchmark.left_out, "not_run": dict(self.not_run), "sessions": [*self.sessions, *more],
        }  # fmt: skip


def _why(error: BaseException) -> str:
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


def machine(benchmark: Benchmark) -> dict[str, str]:
    """What a result is worth nothing without, and nothing that names the place."""
    found = {"Cores": f"{os.cpu_count()} ({platform.machine()})", "Python": platform.python_version()}
    found["Versions"] = ", ".join(f"{name} {version}" for name, version in versions().items())
    if benchmark.gpus:
        found["GPU"] = ", ".join(f"{gpu.name}, {gpu.total / 2**30:.1f} GiB" for gpu in benchmark.gpus)
        found["Driver"] = benchmark.driver
    return found


def versions() -> dict[str, str]:
    """Of the packages that matter and are installed."""
    return {name: found for name in _PACKAGES if (found := installed_version(name))}


def right(results: Mapping[str, Any]) -> bool:
    """Whether every arm's outputs were right and every session has a whole round."""
    return bool(results["sessions"]) and not results.get("not_run") and all(map(_is_right, results["sessions"]))


def _is_right(session: Mapping[str, Any]) -> bool:
    whole = session["rounds"] and not (session["failed"] or session["not_started"] or session.get("ended"))
    return bool(whole) and all(row["outputs"]["right"] for row in session["rows"])


def _gpus(options: Namespace, around: Surroundings) -> tuple[GpuFacts, ...]:
    found = around.nvml.gpus
    if not found or options.engine == "tiny":
        return ()
    if options.gpu >= len(found):
        raise ConfigError(f"--gpu {options.gpu}: there are {len(found)} GPUs", "give NVML's index, from 0")
    return (found[options.gpu], *(gpu for gpu in found if gpu.index != options.gpu))


def _why_no_mps(around: Surroundings, gpus: tuple[GpuFacts, ...]) -> str:
    if not gpus:
        return "there is no GPU"
    try:
        # Engines join by their environment here, so the plugin does not matter.
        require_possible(run_checks(around, gpus[0].uuid), plugin=False)
    except PlacementError as error:
        return error.message
    return ""

"""One session: start what the plan says, measure windows in interleaved rounds, end everything.

A window is one arm under one load: some batches with their gaps, its trainer fed without a pause. All other trainers
are at rest meanwhile, with nothing in flight.
"""

from __future__ import annotations

import os
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from mps_trainer.bench.arms import Arm, dedicated
from mps_trainer.bench.engine import BatchResult, EngineProcess
from mps_trainer.bench.load import Batch, Load
from mps_trainer.bench.meters import Meter
from mps_trainer.bench.plan import SessionPlan, guess_batch_s
from mps_trainer.bench.setting import Setting
from mps_trainer.bench.trainers import Trainer
from mps_trainer.bench.work import Work
from mps_trainer.errors import MpsTrainerError, RunError

_ENGINE_READY_S = 600.0
_SILENT_S = 600.0
_END_S = 5.0

#: What `failed` says then.
INTERRUPTED = "interrupted"

Raw = dict[str, Any]


class OutOfTimeError(RunError):
    """The budget ends amid a round, which is then dropped."""


class Session:
    """Runs a plan.

    Args:
        setting: makes trainers and engines of this machine.
        deadline: of `time.monotonic()`; rounds that would end after it are not begun.
        tell: called with what happens now.
        keep: called after each whole round, when `found` holds it.
    """

    def __init__(
        self,
        plan: SessionPlan,
        options: Namespace,
        setting: Setting,
        deadline: float,
        tell: Callable[[str], None],
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan, self._options, self._setting = plan, options, setting
        self._deadline, self._tell, self._keep = deadline, tell, keep
        # By arm and task.
        self._trainers: dict[tuple[str, str], Trainer] = {}
        self._engines: dict[str, EngineProcess] = {}
        self._alone_s = guess_batch_s(options)
        self._round_s = plan.round_s
        self._done = 0
        self._alone: dict[str, Arm] = {}
        self._broken: dict[str, dict[str, str]] = {work.name: {} for work in plan.works}
        self._windows: dict[str, list[Raw]] = {work.name: [] for work in plan.works}
        self._alones: dict[str, list[Raw]] = {work.name: [] for work in plan.works}
        self._end_s = _END_S
        #: Trainers that ended amid a window: by task and arm, why.
        self._ended: dict[str, dict[str, str]] = {work.name: {} for work in plan.works}
        self._found: Raw = {"cut": "", "failed": "", "rounds": 0, "closing": []}

    def run(self) -> list[Raw]:
        """Everything measured, by task; `cut` says so when it is less than asked for, `failed` when something broke.

        Whole rounds are kept, whatever ends the next one; what fails before the first round is raised.
        """
        found = self._found
        with ExitStack() as stack:
            stack.enter_context(self._setting)
            self._start(stack)
            found["engines"] = {name: engine.facts for name, engine in self._engines.items()}
            self._warm_up()
            found["batch_alone_s"] = self._alone_s
            blocks = 2 + (len(self._engines) > 1)
            self._end_s = _END_S + blocks * self._options.closing * self._alone_s
            try:
                self._rounds(found)
                found["closing"] = self._closing()
            except (MpsTrainerError, OSError, KeyboardInterrupt) as error:
                if not self.rounds:
                    # Nothing was measured, and what an earlier benchmark has measured must stay where it is.
                    raise
                interrupted = isinstance(error, KeyboardInterrupt)
                found["failed"] = INTERRUPTED if interrupted else f"{type(error).__name__}: {error}"
        return self.found()

    @property
    def rounds(self) -> int:
        """Whole ones so far."""
        return int(self._found["rounds"])

    def found(self) -> list[Raw]:
        """What `run` returns, as far as it has come."""
        return [
            {
                "task": name, **self._found, "windows": list(self._windows[name]), "alone": list(self._alones[name]),
                "not_started": broken, "ended": self._ended[name],
                "dedicated": self._alone[name].name if name in self._alone else "",
            }
            for name, broken in self._broken.items()
        ]  # fmt: skip

    def _start(self, stack: ExitStack) -> None:
        jobs = [(arm, work) for work in self._plan.works for arm in self._plan.trainers]
        if self._options.overlap:
            # An engine has to find the run whose pace it serves.
            jobs.sort(key=lambda job: not job[0].paced)
        first = sum(arm.paced for arm, _ in jobs) if self._options.overlap else len(jobs)
        self._start_trainers(stack, jobs[:first])
        for name in self._plan.engines:
            self._tell(f"starting the engine {name}")
            with pinned(self._options.pin_engine):
                self._engines[name] = self._setting.engine(name)
            stack.callback(self._engines[name].close)
        self._start_trainers(stack, jobs[first:])
        if not self._trainers:
            raise RunError(f"no trainer could be started: {self._broken}", "see the logs in --work-dir")
        for work in self._plan.works:
            arms = [arm for arm in self._plan.trainers if (arm.name, work.name) in self._trainers]
            if arms:
                self._alone[work.name] = dedicated(arms)
        for name, engine in self._engines.items():
            self._tell(f"waiting for the engine {name}")
            engine.wait_ready(_ENGINE_READY_S)
        self._setting.engines_are_up()

    def _start_trainers(self, stack: ExitStack, jobs: Sequence[tuple[Arm, Work]]) -> None:
        for arm, work in jobs:
            self._tell(f"starting the trainer of {arm.name} for {work.name}")
            trainer = self._setting.trainer(arm, work)
            stack.callback(trainer.close)
            try:
                with pinned(self._options.pin_trainer):
                    trainer.start()
            except (MpsTrainerError, OSError) as error:
                # The others are worth their time all the same.
                trainer.close()
                self._broken[work.name][arm.name] = str(error)
                continue
            self._trainers[arm.name, work.name] = trainer

    def _warm_up(self) -> None:
        load, seconds = self._plan.loads[0], []
        for name, engine in self._engines.items():
            for number in range(self._options.warmup):
                self._tell(f"warming up the engine {name}")
                result = engine.run(load.batch(number), _SILENT_S)
                if name == self._plan.engines[0]:
                    seconds.append(result.seconds)
        self._alone_s = sorted(seconds[len(seconds) // 2 :])[0]
        self._round_s *= self._alone_s / guess_batch_s(self._options)

    def _rounds(self, found: Raw) -> None:
        for number in range(self._plan.rounds):
            begin = time.monotonic()
            if begin + self._round_s + self._end_s > self._deadline and number:
                found["cut"] = f"the budget ended after {number} of {self._plan.rounds} rounds"
                return
            windows: list[tuple[Work | None, Raw]] = []
            try:
                for arm, work, load in self._plan.order(number):
                    if work is None or (arm.name, work.name) in self._trainers:
                        windows.append((work, self._window(arm, work, load, number)))
                alone = {
                    name: self._trainer_alone(name, arm, number)
                    for name, arm in self._alone.items()
                    if (arm.name, name) in self._trainers
                }
            except OutOfTimeError as error:
                if not number:
                    raise
                found["cut"] = f"{error.message}; the round begun is left out"
                return
            for name, mine in self._windows.items():
                mine += [window for work, window in windows if window and (work is None or work.name == name)]
            for name, one in alone.items():
                self._alones[name] += [one] if one else []
            found["rounds"] = number + 1
            self._round_s = time.monotonic() - begin
            self._keep()
            if not self._trainers:
                raise RunError("no trainer is left", "see the logs in --work-dir")

    def _next(self, what: str) -> None:
        self._done += 1
        total = self._plan.windows * self._plan.rounds
        if time.monotonic() + self._end_s > self._deadline:
            raise OutOfTimeError("the budget ended amid a round", "raise --budget-s, or ask for fewer arms and loads")
        self._tell(f"{self._done} of {total} windows: {what}")

    def _window(self, arm: Arm, work: Work | None, load: Load, number: int) -> Raw:
        """Empty when the arm's trainer had ended before it."""
        self._next(f"{load.name}, {arm.name}" + (f", {work.name}" if work is not None else ""))
        trainer = self._trainers[arm.name, work.name] if work is not None else None
        engine = self._engines[arm.engine]
        if work is not None and trainer is not None and self._ends(arm, work.name, trainer.resume):
            return {}
        meter = Meter(engine.pid, trainer.pids() if trainer is not None else [], trainer)
        batches = []
        for i in range(self._options.batches):
            batch = load.batch(number * self._options.batches + i)
            batches.append(describe_batch(batch, engine.run(batch, _SILENT_S)))
            silence(load.gap_s(batch, self._alone_s))
        measured = meter.read()
        if work is not None and trainer is not None:
            why = self._ends(arm, work.name, trainer.pause)
            measured |= {"score_ms": list(trainer.score_ms), "problem": why or trainer.problem()}
            if arm.paced:
                measured["pace_source"] = trainer.pace_source()
        return {"arm": arm.name, "load": load.name, "round": number, "batches": batches, **measured}

    def _ends(self, arm: Arm, task: str, act: Callable[[], None]) -> str:
        """Why the trainer cannot go on, after which it is no more among them; "" when `act` went well."""
        try:
            act()
        except (MpsTrainerError, OSError) as error:
            why = error.message if isinstance(error, MpsTrainerError) else f"{type(error).__name__}: {error}"
        else:
            return ""
        # The others are worth their time all the same.
        self._ended[task][arm.name] = why
        self._tell(f"arm {arm.name}, task {task}: {why}")
        self._trainers.pop((arm.name, task)).close()
        return why

    def _trainer_alone(self, task: str, arm: Arm, number: int) -> Raw:
        self._next(f"{task}, the trainer of {arm.name} alone")
        trainer = self._trainers[arm.name, task]
        if self._ends(arm, task, trainer.resume):
            return {}
        meter = Meter(0, trainer.pids(), trainer)
        silence(self._options.dedicated_s)
        measured = meter.read()
        if self._ends(arm, task, trainer.pause):
            return {}
        return {"arm": arm.name, "round": number, **measured, "score_ms": list(trainer.score_ms)}

    def _closing(self) -> list[Raw]:
        """Solo batches with all idle processes there, then without the trainers, then without the second engine."""
        main = self._plan.engines[0]
        if not self._options.closing:
            return []
        blocks = [self._block("all trainers and engines there, at rest", main)]
        for trainer in self._trainers.values():
            trainer.close()
        blocks.append(self._block("trainers ended", main))
        if len(self._engines) > 1:
            for name in self._plan.engines[1:]:
                self._engines[name].close()
            blocks.append(self._block("the second engine ended too", main))
        return blocks

    def _block(self, what: str, engine: str) -> Raw:
        self._tell(f"closing: {what}")
        batch = self._plan.loads[0].batch(0)
        return {
            "what": what,
            "seconds": [self._engines[engine].run(batch, _SILENT_S).seconds for _ in range(self._options.closing)],
        }


def describe_batch(batch: Batch, result: BatchResult) -> Raw:
    """What is kept of a batch; its step times are reduced to two quantiles."""
    return {
        "batch": batch.index, "seconds": round(result.seconds, 6), "tokens": result.tokens,
        "wanted_tokens": batch.tokens, "digest": result.digest, "comparable": batch.arrives_at_once,
        "not_finite": result.not_finite, "token_ms_p50": result.token_ms(0.5), "token_ms_p99": result.token_ms(0.99),
    }  # fmt: skip


def silence(seconds: float) -> None:
    """The gap between two batches: nothing is generated."""
    threading.Event().wait(seconds)


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """What is started inside runs on these cores; no cores: wherever the kernel likes."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

"""What a session will do, on paper: its order, its processes, its memory, its time. Starts nothing.

    daemon > trainers of all tasks > engines, side by side > warm-up > rounds of windows > closing blocks > end

Trainers come before engines, and the size of an engine's KV cache is given to it: vLLM would measure a GPU whose
memory must not change meanwhile. All stay to the end and one of each kind is active at a time, since membership in
MPS is fixed when a process starts. Tasks share the engines, and the windows without a trainer.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from mps_trainer.bench.arms import Arm, dedicated
from mps_trainer.bench.load import Load
from mps_trainer.bench.vllm_engine import needed_bytes
from mps_trainer.bench.work import Work
from mps_trainer.launcher.memory_plan import CONTEXT, SLACK, SMALLEST_POOL, EngineWish, MemoryPlan, plan_memory

_TRAINER_S, _DAEMON_S, _REST_S, _END_S = 9.0, 1.0, 0.7, 5.0
_ENGINE_S = {"tiny": 5.0, "vllm": 65.0}


@dataclass(frozen=True)
class Step:
    """One line of the plan; seconds are an estimate."""

    what: str
    seconds: float


@dataclass(frozen=True)
class SessionPlan:
    """One session.

    Attributes:
        works: the tasks.
        engines: in the order of their start.
        alone: the arm whose trainer is measured without a rollout.
        memory: of the engines' GPU; None on the CPU.
        round_s: estimated seconds of one round.
    """

    works: tuple[Work, ...]
    arms: tuple[Arm, ...]
    loads: tuple[Load, ...]
    engines: tuple[str, ...]
    alone: Arm
    rounds: int
    steps: tuple[Step, ...]
    round_s: float
    memory: MemoryPlan | None = None

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return sum(step.seconds for step in self.steps)

    @property
    def trainers(self) -> tuple[Arm, ...]:
        """The arms that have one, in the order of their start."""
        return tuple(arm for arm in self.arms if arm.trainer)

    @property
    def windows(self) -> int:
        """Windows of one round, those of the trainers alone included."""
        return len(self.order(0)) + len(self.works)

    def order(self, number: int) -> list[tuple[Arm, Work | None, Load]]:
        """The windows of a round; each round begins with another arm, so that none is always the first.

        A window without a trainer is of all tasks.
        """
        first = number % len(self.arms)
        arms = self.arms[first:] + self.arms[:first]
        return [
            (arm, work, load)
            for load in self.loads
            for arm in arms
            for work in (self.works if arm.trainer else (None,))
        ]

    @property
    def share_of_gpu(self) -> dict[str, float]:
        """gpu_memory_utilization of each engine."""
        return dict(zip(self.engines, self.memory.utilization, strict=True)) if self.memory else {}


def make_plan(
    works: Sequence[Work],
    arms: Sequence[Arm],
    loads: Sequence[Load],
    options: Namespace,
    gpu: tuple[int, int] | None = None,
) -> SessionPlan:
    """The plan of a session.

    Args:
        gpu: bytes of the engines' GPU, total and used now; None on the CPU.

    Raises:
        PlacementError: engines and trainers do not fit on the GPU.
    """
    engines = tuple(kind for kind in ("plain", "client") if any(arm.engine == kind for arm in arms))
    if options.engine == "tiny" and options.engines == 2:
        engines = ("plain", "second")
    batch_s = guess_batch_s(options)
    cycles = sum(batch_s / (1 - load.gap) * options.batches for load in loads)
    trainers = [arm for arm in arms if arm.trainer]
    of_a_load = len(arms) + (len(works) - 1) * len(trainers)
    round_s = of_a_load * (cycles + len(loads) * _REST_S) + len(works) * (options.dedicated_s + _REST_S)
    steps = [Step("the MPS daemon of the benchmark", _DAEMON_S)] if any(arm.mps for arm in arms) else []
    steps += [
        Step(f"trainer of {arm.name} for {work.name}: {arm.what}", _TRAINER_S) for work in works for arm in trainers
    ]
    # They start side by side.
    steps += [
        Step(f"engine {name} ({options.engine})", 0.0 if i else _ENGINE_S[options.engine])
        for i, name in enumerate(engines)
    ]
    steps.append(Step(f"{options.warmup} batches of each engine to warm up", batch_s * options.warmup * len(engines)))
    windows = of_a_load * len(loads) + len(works)
    steps.append(Step(f"{options.rounds} rounds of {windows} windows, interleaved", options.rounds * round_s))
    blocks = 2 + (len(engines) > 1)
    steps.append(Step(f"{blocks} closing blocks of {options.closing} solo batches", blocks * options.closing * batch_s))
    steps.append(Step("the end", _END_S))
    memory = _memory(works, trainers, engines, options, gpu) if gpu is not None else None
    return SessionPlan(
        tuple(works), tuple(arms), tuple(loads), engines, dedicated(list(arms)), options.rounds, tuple(steps), round_s,
        memory,
    )  # fmt: skip


def guess_batch_s(options: Namespace) -> float:
    """Seconds of one batch, before any was measured; rough, for the budget alone."""
    if options.engine == "vllm":
        per_step = {"0.5B": 0.006, "1.5B": 0.008, "7B": 0.014}[options.shape]
    else:
        per_step = 0.0006 + 0.004 * (options.tiny_width / 512) ** 2 * options.tiny_layers / 2
    return float(options.longest_tokens * per_step)


def _memory(
    works: Sequence[Work], trainers: Sequence[Arm], engines: Sequence[str], options: Namespace, gpu: tuple[int, int]
) -> MemoryPlan:
    beside = sum(arm.place == "gpu" for arm in trainers)
    # One pool in the plan stands for all of them: each further one brings a context of its own.
    pools = beside * sum(work.pool for work in works) + max(0, beside * len(works) - 1) * (CONTEXT + SLACK)
    tokens = options.sequences * (options.prompt_tokens + options.longest_tokens)
    needs = needed_bytes(options.shape, tokens)
    wishes = [EngineWish(f"engine {name}", options.utilization / len(engines), needs) for name in engines]
    return plan_memory(*gpu, wishes, wish=max(pools, SMALLEST_POOL), mps=any(arm.mps for arm in trainers))


def describe(plan: SessionPlan, left_out: dict[str, str]) -> list[str]:
    """Lines for people."""
    names = ", ".join(work.name for work in plan.works)
    lines = [f"task {names}: {len(plan.arms)} arms, {', '.join(load.name for load in plan.loads)}"]
    lines += [f"  {i}. {step.what}: about {step.seconds:.0f} s" for i, step in enumerate(plan.steps, 1)]
    lines += [f"  left out: {name}: {why}" for name, why in left_out.items()]
    if plan.memory is not None:
        lines += [f"  {size:>10} {share:>7}  {what}" for what, size, share in plan.memory.table()]
    lines.append(f"  about {plan.seconds:.0f} s in all")
    return lines

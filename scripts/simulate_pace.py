#!/usr/bin/env python3
"""A SIMULATION of the pace beside a rollout: no GPU, no engine, no measurement. For tests and for tuning.

    python scripts/simulate_pace.py [--batches 4] [--seed 0] [--json RESULT.json]

The real controller runs against a model of an engine: batches with a long tail, decode iterations that take longer
while the trainer runs, gaps of 0, 10 and 30 % of the cycle. What the trainers cost the engine when they never stop, and
what the engine leaves them (A and B) are figures of docs/results; how that changes with fewer requests, and how
long a step takes, are assumptions. It shows that the controller does with such an engine what it should, and
nothing of what a real one does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mps_trainer.run.engine_load import EngineLoad
from mps_trainer.sidecar.pace.controller import Controller


@dataclass(frozen=True)
class Trainer:
    """Measured: `slows` (of a full batch, trained on without a stop) and `left` (speed beside it, of dedicated).

    Assumed: `step_s` of a dedicated trainer; `tail`, which share of the slowdown is left with one request.
    """

    name: str
    slows: float
    left: float
    step_s: float
    tail: float = 0.4

    def slowdown(self, running: int, most: int) -> float:
        """While it trains, with so many requests."""
        return self.slows * (self.tail + (1 - self.tail) * running / most)

    def speed(self, running: int, most: int) -> float:
        """Of dedicated, beside so many requests."""
        return 1 - (1 - self.left) * (self.tail + (1 - self.tail) * running / most) if running else 1.0


A = Trainer("A", slows=1 / 0.937 - 1, left=0.92, step_s=0.0015)
B = Trainer("B", slows=1 / 0.809 - 1, left=0.40, step_s=0.030)


@dataclass(frozen=True)
class Engine:
    """Iterations of a 7B shape: about 12 ms with 256 requests; noise is of each iteration."""

    sequences: int = 256
    base_s: float = 0.0065
    each_s: float = 0.000022
    prefill_s: float = 0.12
    prefills: int = 4
    median_tokens: int = 220
    longest_tokens: int = 700
    noise: float = 0.02

    def batch(self, rng: random.Random) -> list[int]:
        """Running requests after each decode iteration of a batch, the longest response last."""
        lengths = [min(self.longest_tokens, int(rng.lognormvariate(0, 0.6) * self.median_tokens) + 1)
                   for _ in range(self.sequences - 1)] + [self.longest_tokens]  # fmt: skip
        ends = [0] * (self.longest_tokens + 1)
        for length in lengths:
            ends[length] += 1
        running, left = [], self.sequences
        for count in ends[1:]:
            left -= count
            running.append(left)
        return running


class Simulation:
    """One clock for the engine and the trainer. The trainer always has a step to take.

    Args:
        silent_from: from this second on the engine's signal stands still; its work goes on.
        change: from the second batch on, the trainer is this one.
    """

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        seed: int = 0,
        *,
        silent_from: float = 1e9,
        change: Trainer | None = None,
    ) -> None:
        self.engine, self.trainer, self.change = engine, trainer, change
        self.rng = random.Random(seed)
        self.now = self.steps = 0.0
        self.load: EngineLoad | None = None
        self.silent_from = silent_from
        self._iterations = self._tokens = self._prefill = self._running = 0
        self._left: float | None = None
        self._ask_at = 0.0

    def run(
        self, batches: int, gap: float, controller: Controller | None, fixed: float | None = None
    ) -> dict[str, Any]:
        """Wall seconds of each batch, solo seconds of the same, and steps."""
        walls, solos, per_batch = [], [], []
        alone_gap = 0.0
        for number in range(batches):
            if number and self.change is not None:
                self.trainer = self.change
            begin, before = self.now, self.steps
            solo = self._batch(controller, fixed)
            walls.append(self.now - begin)
            solos.append(solo)
            alone_gap = solo * gap / (1 - gap)
            self._work(alone_gap, 0, controller, fixed)
            per_batch.append(self.steps - before)
        return {
            "kept": sum(solos) / sum(walls), "walls": walls, "solos": solos, "steps": self.steps,
            "share": self.steps * self.trainer.step_s / self.now, "per batch": per_batch,
        }  # fmt: skip

    def _batch(self, controller: Controller | None, fixed: float | None) -> float:
        solo, engine = 0.0, self.engine
        running = engine.batch(self.rng)
        self._running = engine.sequences
        for _ in range(engine.prefills):
            self._prefill += 8192
            solo += self._iteration(engine.prefill_s, engine.sequences, controller, fixed)
        for left in running:
            before = self._running
            seconds = engine.base_s + engine.each_s * before
            self._running = left
            solo += self._iteration(seconds, before, controller, fixed)
        return solo

    def _iteration(self, seconds: float, running: int, controller: Controller | None, fixed: float | None) -> float:
        seconds *= self.rng.lognormvariate(0, self.engine.noise)
        self._work(seconds, running, controller, fixed)
        self._iterations += 1
        self._tokens += running
        if self.now < self.silent_from:
            self.load = EngineLoad(self.now, self._running, 0, self._iterations, self._tokens, self._prefill)
        return seconds

    def _work(self, seconds: float, running: int, controller: Controller | None, fixed: float | None) -> None:
        """Until the engine has done `seconds` of solo work (or of silence), the trainer beside it."""
        most, trainer = self.engine.sequences, self.trainer
        slow = 1 + trainer.slowdown(running, most) if running else 1.0
        speed = trainer.speed(running, most)
        while seconds > 1e-12:
            if self._left is None and self.now >= self._ask_at:
                self._ask(controller, fixed)
            if self._left is None:
                passed = min(seconds, max(self._ask_at - self.now, 1e-9))
                seconds -= passed
            else:
                passed = min(seconds * slow, self._left / speed)
                seconds -= passed / slow
                self._left -= passed * speed
            self.now += passed
            if self._left is not None and self._left <= 1e-12:
                self._left = None
                self.steps += 1
                if controller is not None:
                    controller.stepped(self.now - self._began)

    def _ask(self, controller: Controller | None, fixed: float | None) -> None:
        if controller is not None:
            allowed = controller.may_step(self.now, self.load)
            self._ask_at = self.now if allowed else self.now + controller.rest_s()
        else:
            # A duty cycle of one second, whatever the engine does; None: no trainer at all.
            allowed = fixed is not None and (self.now % 1.0) < fixed
            self._ask_at = self.now if allowed else self.now + 0.01
        if allowed:
            self._left, self._began = self.trainer.step_s, self.now


def one(trainer: Trainer, gap: float, slowdown: float, batches: int, seed: int) -> dict[str, Any]:
    """The controller, a trainer that never stops, and the best fixed duty cycle that keeps the same limit."""
    paced = Simulation(Engine(), trainer, seed).run(batches, gap, Controller(slowdown))
    always = Simulation(Engine(), trainer, seed).run(batches, gap, None, fixed=1.0)
    duty = slowdown / trainer.slows
    fixed = Simulation(Engine(), trainer, seed).run(batches, gap, None, fixed=duty)
    return {
        "trainer": trainer.name, "gap": gap, "max_rollout_slowdown": slowdown,
        **{f"{name} {what}": found[what] for name, found in (("pace", paced), ("always", always), ("fixed", fixed))
           for what in ("kept", "share")},
        "fixed duty": duty,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tail", type=float, default=A.tail, help="share of the slowdown left with one request")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        "SIMULATION, no measurement. kept: of the solo rollout; share: steps, of a dedicated trainer over the cycle\n"
    )
    print("| trainer | limit | gap | pace kept | pace share | always kept | always share | fixed kept | fixed share |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for trainer, limits in ((A, (0.03,)), (B, (0.03, 0.05))):
        for limit in limits:
            for gap in (0.0, 0.1, 0.3):
                row = one(replace(trainer, tail=args.tail), gap, limit, args.batches, args.seed)
                rows.append(row)
                cells = [
                    f"{row[f'{name} {what}']:.3f}" for name in ("pace", "always", "fixed") for what in ("kept", "share")
                ]
                print(f"| {trainer.name} | {limit:g} | {gap:.0%} | {' | '.join(cells)} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"simulation": True, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""When to train: a function of time and of how busy the engine is. No I/O, no clock, no sleep.

    idle (no request, or silent)   always
    busy                           by an account: each second of the rollout earns `max_slowdown` seconds, each second
                                   of training costs what it slows the rollout down (`slowdown.py`). A window of
                                   training begins when it can be paid and ends when the account is empty.
    the floor                      always, and is charged too

So a kind of load on which training costs little is trained on much, and the account is what keeps the sum right
whatever a single step takes. Windows on and off in turn are the measurement as well; where training is so cheap
that it would never stop, it stops for a short while now and then, to be compared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from mps_trainer.config.pace import PaceTuning
from mps_trainer.run.engine_load import EngineLoad
from mps_trainer.sidecar.pace.slowdown import Slowdown

#: Not asked for so long: the window that is open then is of no kind, and the time earns what the totals prove.
_LOOKED_AWAY_S = 0.25
#: Silence with requests running is an iteration until it has lasted so many times the longest of late; what takes
#: longer than the second number is a pause and no iteration.
_LONGEST_TIMES, _NO_ITERATION_S = 3.0, 5.0
#: A step that needs a longer rest than this before it is taken is too large.
_LONGEST_REST_S = 5.0
_ASK_AGAIN_S = 0.01


@dataclass(frozen=True)
class Telling:
    """What a person may want to know.

    Attributes:
        share: of the busy time so far that was spent training; None before any.
        slowdown: measured, of the engine while we train; None while unknown.
        slice_s: the longest step that fits; None while the engine was never busy.
    """

    share: float | None
    slowdown: float | None
    slice_s: float | None


class Controller:
    """Asked before each step whether it may be taken, and told after it how long it took.

    Args:
        max_slowdown: share by which the rollout may be slower.
        tuning: of it, `margin` is spent; the rest is for what is measured late.
    """

    def __init__(self, max_slowdown: float, tuning: PaceTuning | None = None) -> None:
        self._tuning = tuning = tuning or PaceTuning()
        self._presumed = tuning.presumed if tuning.fixed is None else tuning.fixed
        self.slowdown = Slowdown(self._presumed)
        self._earn = tuning.margin * max_slowdown
        self._account = 0.0
        self._on = False
        self._since = self._window_since = 0.0
        self._asked: float | None = None
        self._busy = False
        self._iterations: deque[float] = deque(maxlen=31)
        self._last: EngineLoad | None = None
        self._newest: EngineLoad | None = None
        self._prompts = False
        self._spans: deque[float] = deque(maxlen=100)
        self._steps: deque[float] = deque(maxlen=31)
        self._busy_s = self._trained_s = 0.0
        self._cost = self._presumed

    def may_step(self, now: float, load: EngineLoad | None, *, busy: bool | None = None) -> bool:
        """Whether to take a step now.

        Args:
            load: of the engines on this GPU; None when nothing tells.
            busy: without a load, what else says: is the GPU computing for others? None: presume that it is.
        """
        passed = 0.0 if self._asked is None else max(0.0, now - self._asked)
        away = passed > _LOOKED_AWAY_S + self._longest_step
        self._asked = now
        before = self._note_span(load, away=away)
        was_busy, self._busy = self._busy, self._is_busy(now, load, busy)
        if not self._busy:
            if was_busy:
                self._stop(now, load)
            return True
        if not was_busy:
            # Idle time earns nothing, or a burst would meet the begin of a batch.
            self._account = min(self._account, 0.0)
            self._stop(now, load)
            passed = min(passed, _LOOKED_AWAY_S)
        elif away:
            passed = self._busy_while_away(passed, before, load)
            self._look_again(now, before, load)
        self._busy_s += passed
        # An engine elsewhere that is summed in would thin out what the one here loses.
        measures = load is not None and load.located and self._tuning.fixed is None
        self._cost = self.slowdown.of(load.running) if load is not None and measures else self._presumed
        price = self._window_s * self._cost
        # Bounded both ways: what a floor has cost is not held against the trainer for ever.
        deepest = -(self._tuning.debt * self._earn + 2 * price)
        self._account = max(deepest, min(self._account + passed * self._earn, 2 * price))
        if load is not None:
            self._look(load)
        self._switch(now, load, price)
        # Such a window is left out of the comparison: it has prompts in it.
        return self._on and not (load is not None and self._tuning.pause_on_prefill and self._prompts)

    def stepped(self, seconds: float) -> None:
        """A step has been taken, allowed or not."""
        self._steps.append(seconds)
        if self._busy:
            self._account -= seconds * self._cost
            self._trained_s += seconds
            self.slowdown.trained(seconds)

    def rest_s(self) -> float:
        """After a no: seconds until it is worth asking again. Short, for the windows are measured by asking."""
        return min(_ASK_AGAIN_S, max(_ASK_AGAIN_S / 10, self._window_s / 4))

    @property
    def busy(self) -> bool:
        """Whether the engine was busy, or nobody could tell, when we were asked."""
        return self._busy

    @property
    def in_debt(self) -> bool:
        """Whether more was trained than the rollout may lose: only the floor does that for long."""
        return self._account < -self._window_s * self._cost

    def tell(self) -> Telling:
        """As it is now."""
        known = self._busy_s > 0
        longest = _LONGEST_REST_S * self._earn / max(self._cost, 1e-9)
        return Telling(
            self._trained_s / self._busy_s if known else None, self.slowdown.measured, longest if known else None
        )

    @property
    def step_s(self) -> float | None:
        """The median of the last steps."""
        return median(self._steps) if self._steps else None

    @property
    def silent_s(self) -> float:
        """Seconds after which an engine with requests that says nothing counts as idle."""
        return max(self._tuning.silent, _LONGEST_TIMES * max(self._spans, default=0.0))

    @property
    def _longest_step(self) -> float:
        return max(self._steps, default=0.0)

    @property
    def _window_s(self) -> float:
        iteration = median(self._iterations) if self._iterations else 0.01
        wanted = min(self._tuning.longest_window, self._tuning.window_iterations * iteration)
        return max(self._tuning.shortest_window, wanted, 2 * (self.step_s or 0.0))

    def _is_busy(self, now: float, load: EngineLoad | None, busy: bool | None) -> bool:
        if load is None:
            return busy is not False
        return bool(load.running + load.waiting) and now - load.at <= self.silent_s

    def _note_span(self, load: EngineLoad | None, *, away: bool) -> EngineLoad | None:
        """Remember how long iterations are, those with prompts too; what was seen before."""
        before = self._newest
        if load is None or (before is not None and load.iterations == before.iterations):
            # The first word of an iteration counts: later looks may show a silent engine without its requests.
            return before
        self._newest = load
        self._prompts = before is not None and load.prefill > before.prefill
        worked = before is not None and not away and before.running + before.waiting
        if before is not None and worked and load.iterations > before.iterations:
            span = (load.at - before.at) / (load.iterations - before.iterations)
            if 0 < span <= _NO_ITERATION_S:
                self._spans.append(span)
        return before

    def _busy_while_away(self, passed: float, before: EngineLoad | None, load: EngineLoad | None) -> float:
        """Seconds of an absence in which the engine surely worked: by its iterations, or a little where none tells."""
        if before is None or load is None or not self._iterations:
            return min(passed, _LOOKED_AWAY_S)
        return min(passed, max(0, load.iterations - before.iterations) * median(self._iterations))

    def _look_again(self, now: float, before: EngineLoad | None, load: EngineLoad | None) -> None:
        """After an absence: the open window is dropped, and all that came before where the work has become another."""
        self._last, self._window_since = None, now
        if load is not None:
            self.slowdown.drop(load)
            if before is None or before.prefill != load.prefill:
                self.slowdown.forget_row()

    def _look(self, load: EngineLoad) -> None:
        last, self._last = self._last, load
        self.slowdown.look(load)
        if last is not None and load.iterations > last.iterations and load.prefill == last.prefill:
            self._iterations.append((load.at - last.at) / (load.iterations - last.iterations))

    def _switch(self, now: float, load: EngineLoad | None, price: float) -> None:
        lasted = now - self._since
        if self._on:
            probe = load is not None and lasted >= self._tuning.probe_every * self._window_s
            wanted = not (self._account <= 0 or probe)
        else:
            # A window off is measured too, and has to be as long.
            wanted = self._account >= price and lasted >= self._window_s
        changes = wanted != self._on
        if load is not None and (changes or now - self._window_since >= self._window_s):
            self.slowdown.end(load)
            self.slowdown.begin(load, on=wanted)
            self._window_since = now
        if changes:
            self._on, self._since = wanted, now

    def _stop(self, now: float, load: EngineLoad | None) -> None:
        self._on, self._since, self._last = False, now, None
        self._window_since = now
        self.slowdown.forget_row()
        if load is not None:
            self.slowdown.begin(load, on=False)

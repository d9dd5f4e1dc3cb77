"""How much slower the engine is while the sidecar trains: measured from the engine's own iterations.

Time is cut into windows in which the sidecar trains all the while or not at all. Where the one ends and the other
begins the two next to each other are compared, and each such ratio is averaged with that of the next change, which
goes the other way: so a batch that shrinks steadily cancels out.

    off | off | on | on | off | off
            `---'   `---'            one estimate: the geometric mean of both on / off

Medians, by the number of running requests (powers of two), since a few long rollouts share a GPU better than 256.
No I/O and no clock of its own.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from mps_trainer.config.pace import PaceTuning
from mps_trainer.run.engine_load import EngineLoad

#: Taken for the slowdown until it has been measured: more than anything seen on an H200, so that we begin gently.
PRIOR = PaceTuning().presumed
_KEPT = 15
_ENOUGH = 4
#: Of a window that counts: whole iterations, and the share of it in which the sidecar trained, or did not.
_ITERATIONS = 4
_WHOLE = 0.8
#: Of two windows: requests may end meanwhile, but the batch must stay the same kind of work.
_MOST_CHANGE = 1.6
#: An estimate moves only by more than this share of itself.
_HYSTERESIS = 0.1
_LOWEST = 0.004


@dataclass(frozen=True)
class _Window:
    on: bool
    iteration_s: float
    running: float


class Slowdown:
    """Estimates by zone; a zone is the power of two of the running requests."""

    def __init__(self, presumed: float = PRIOR) -> None:
        self._presumed = presumed
        self._ratios: dict[int, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=3 * _KEPT)
        self._told: dict[int, float] = {}
        self._before: _Window | None = None
        self._change: tuple[bool, float] | None = None
        self._on = False
        self._begin: EngineLoad | None = None
        self._first = 0
        self._trained_s = 0.0

    def begin(self, load: EngineLoad, *, on: bool) -> None:
        """A window begins. After a change the iteration that runs now is of both kinds: counting starts at its end."""
        self._begin = load if on == self._on and self._before is not None else None
        self._on, self._first, self._trained_s = on, load.iterations, 0.0

    def look(self, load: EngineLoad) -> None:
        """Called often within a window."""
        if self._begin is None and load.iterations > self._first:
            self._begin = load
            self._trained_s = 0.0

    def trained(self, seconds: float) -> None:
        """The sidecar took a step within this window."""
        self._trained_s += seconds

    def end(self, load: EngineLoad) -> None:
        """The window ends; one that is too short, mixed or with prompts in it breaks the row."""
        begin, self._begin = self._begin, None
        window = None if begin is None else self._measure(begin, load)
        before = self._before
        if window is not None:
            if before is not None and before.on != window.on:
                self._compare(before, window)
            self._before = window
        elif before is None or before.on != self._on or (begin is not None and begin.prefill != load.prefill):
            # The rest of a window after a whole one of its kind may be too short; that one stands for it.
            self.forget_row()

    def drop(self, load: EngineLoad) -> None:
        """Nothing is known of the window that is open; it begins anew with the iteration after this one."""
        self._begin, self._first, self._trained_s = None, load.iterations, 0.0

    def forget_row(self) -> None:
        """What comes next does not follow what was: the engine was idle, or we looked away."""
        self._before = self._begin = self._change = None

    def of(self, running: int) -> float:
        """Share by which iterations take longer while the sidecar trains; what is presumed before anything is known."""
        zone = _zone(running)
        found = self._estimate(zone)
        told = self._told.get(zone)
        if told is None or abs(found - told) > _HYSTERESIS * told:
            self._told[zone] = told = found
        return told

    @property
    def measured(self) -> float | None:
        """The median over all zones; None while too little is known."""
        return max(0.0, median(self._all) - 1) if len(self._all) >= _ENOUGH else None

    def _estimate(self, zone: int) -> float:
        ratios = self._ratios.get(zone, ())
        if len(ratios) >= _ENOUGH:
            return max(_LOWEST, median(ratios) - 1)
        # A smaller batch was never seen to suffer more, so that of its larger neighbour is the safe guess.
        for larger in range(zone + 1, zone + 4):
            if len(self._ratios.get(larger, ())) >= _ENOUGH:
                return max(_LOWEST, median(self._ratios[larger]) - 1)
        measured = self.measured
        return self._presumed if measured is None else max(_LOWEST, measured)

    def _measure(self, begin: EngineLoad, end: EngineLoad) -> _Window | None:
        iterations, seconds = end.iterations - begin.iterations, end.at - begin.at
        if iterations < _ITERATIONS or seconds <= 0 or end.prefill != begin.prefill or not end.running:
            return None
        share = self._trained_s / seconds
        if share < _WHOLE if self._on else share > 1 - _WHOLE:
            return None
        return _Window(self._on, seconds / iterations, (begin.running + end.running) / 2)

    def _compare(self, before: _Window, after: _Window) -> None:
        if before.running > _MOST_CHANGE * after.running:
            self._change = None
            return
        ratio = after.iteration_s / before.iteration_s if after.on else before.iteration_s / after.iteration_s
        last, self._change = self._change, (after.on, ratio)
        if last is not None and last[0] != after.on:
            mean = math.sqrt(ratio * last[1])
            self._all.append(mean)
            self._ratios.setdefault(_zone(round(after.running)), deque(maxlen=_KEPT)).append(mean)


def _zone(running: int) -> int:
    return max(1, running).bit_length()

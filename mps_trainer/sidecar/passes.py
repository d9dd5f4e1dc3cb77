"""Passes over new experiences (`schedule.train: epochs`): which experiences each of the coming steps takes.

Every pass shuffles anew and is cut into steps of `batch_size`; the last step of a pass may be smaller. Experiences are
named by their number in the replay buffer, so a plan that was saved halfway goes on after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from mps_trainer.columns import Array
from mps_trainer.sidecar.replay import Draw, Empty, ReplayBuffer

_NONE: Array = np.empty(0, np.int64)


class Passes:
    """The plan for the coming steps, the first of them first."""

    def __init__(self, epochs: int, batch_size: int) -> None:
        self._epochs = epochs
        self._batch_size = batch_size
        self._next_number = 0
        self._steps: deque[Array] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def plan(self, replay: ReplayBuffer) -> None:
        """Add passes over what came into the buffer since the last plan."""
        # What `min_experiences` held back may have left since.
        self.keep_held(replay)
        new = replay.numbers_from(self._next_number)
        self._next_number = replay.added
        for _ in range(self._epochs):
            shuffled = replay.shuffled(new)
            for start in range(0, len(new), self._batch_size):
                self._steps.append(shuffled[start : start + self._batch_size])

    def draw(self, replay: ReplayBuffer, empty: Empty) -> Draw:
        """The experiences of the next step; none when all that was planned has left the buffer."""
        draw = replay.pick(self._steps.popleft() if self._steps else _NONE, empty)
        while not draw.rows.num_rows and self._steps:
            draw = replay.pick(self._steps.popleft(), empty)
        return draw

    def skip(self, count: int) -> None:
        """Forget the next `count` steps."""
        for _ in range(min(count, len(self._steps))):
            self._steps.popleft()

    def keep_held(self, replay: ReplayBuffer) -> None:
        """Forget experiences that have left the buffer, and steps that have none any more."""
        held = replay.numbers_from(0)
        kept = (numbers[np.isin(numbers, held)] for numbers in self._steps)
        self._steps = deque(numbers for numbers in kept if len(numbers))

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Arrays and plain JSON values."""
        numbers = np.concatenate([_NONE, *self._steps])
        return {"passes.numbers": numbers}, {"sizes": [len(step) for step in self._steps], "next": self._next_number}

    def load_state(self, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        ends = np.cumsum(state["sizes"])
        self._steps = deque(np.split(arrays["passes.numbers"], ends[:-1]) if len(ends) else [])
        self._next_number = state["next"]

"""Which experiences a draw takes, by their age: place 0 is the oldest that is held.

Without classes no place comes twice in a draw. With weights a place is drawn in proportion to its weight among those
that were not drawn yet. With classes each that is held gets the same number of rows; one with fewer experiences than
that has all of them as often as they go in, and the rest once more.

Formulas: recency 2^(-age / half_life). Priority (|loss| + 0.001)^a, and importance weights (N P(i))^(-b) over the
largest of the draw (Schaul et al., Prioritized Experience Replay, arXiv:1511.05952, section 3.3 and 3.4; there b rises
to 1 until the end of training, which a sidecar does not know, so here it stays). With classes N and P(i) are those
within a class: what the balance changes on purpose is not undone.
"""

from __future__ import annotations

import numpy as np

from mps_trainer.columns import Array
from mps_trainer.config import ReplaySettings

#: So that an experience with no loss comes again some time.
LEAST_LOSS = 1e-3
#: Halvings: the least weight is far above the smallest float64, so that nothing is ever impossible.
_MOST_HALVINGS = 900.0


class Sampler:
    """Draws places for one replay buffer. A draw depends on its arguments alone; what is kept only saves time."""

    def __init__(self, settings: ReplaySettings, capacity: int) -> None:
        self._settings = settings
        self._half_life = settings.half_life or max(1, capacity // 4)
        self._recency = np.empty(0)
        self._recency_sum = np.empty(0)
        self._members: list[Array] | None = None

    def changed(self) -> None:
        """The experiences that are held are others now."""
        self._members = None

    def priority(self, losses: Array) -> Array:
        """(n,) float64: what `draw` takes as priorities, of (n,) losses of experiences."""
        floored: Array = np.abs(losses.astype(np.float64)) + LEAST_LOSS
        return np.power(floored, self._settings.priority_exponent)

    def draw(
        self, rng: np.random.Generator, held: int, num_rows: int, priorities: Array | None, classes: Array | None
    ) -> tuple[Array, Array | None]:
        """`num_rows` of `held` places, and with priorities the importance weight of each, above 0 and up to 1."""
        weights = self._weights(held) if priorities is None else priorities
        if classes is not None:
            if self._members is None:
                self._members = [np.flatnonzero(classes == label) for label in np.flatnonzero(np.bincount(classes))]
            places, relative = _draw_balanced(rng, weights, self._members, num_rows)
        elif weights is None:
            return rng.choice(held, num_rows, replace=False), None
        else:
            cumulative = self._recency_sum if priorities is None else np.cumsum(weights)
            places = draw_weighted(rng, weights, num_rows, cumulative)
            relative = weights[places] * (held / cumulative[-1])
        if priorities is None:
            return places, None
        importance = np.power(relative, -self._settings.importance_exponent)
        return places, (importance / importance.max()).astype(np.float32)

    def _weights(self, held: int) -> Array | None:
        if self._settings.sampling != "recency":
            return None
        if len(self._recency) != held:
            ages = np.arange(held - 1, -1, -1)
            self._recency = np.exp2(-np.minimum(ages / self._half_life, _MOST_HALVINGS))
            self._recency_sum = np.cumsum(self._recency)
        return self._recency


def draw_weighted(rng: np.random.Generator, weights: Array, count: int, cumulative: Array) -> Array:
    """`count` different places, one after another, each in proportion to its weight among those that are left.

    Args:
        weights: (n,) float64, all above 0; n is at least `count`.
        cumulative: its running sum.
    """
    taken = np.zeros(len(weights), bool)
    found: list[Array] = []
    missing = count
    while missing:
        # Who was drawn already is passed over: the same as drawing from the others alone.
        points = rng.random(missing) * cumulative[-1]
        places = np.minimum(np.searchsorted(cumulative, points, side="right"), len(weights) - 1)
        first = np.sort(np.unique(places, return_index=True)[1])
        fresh = places[first]
        fresh = fresh[~taken[fresh]]
        taken[fresh] = True
        found.append(fresh)
        missing -= len(fresh)
        if missing > len(fresh):
            # A few places have most of the weight: without them the others come into reach.
            cumulative = np.cumsum(np.where(taken, 0.0, weights))
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _draw_balanced(
    rng: np.random.Generator, weights: Array | None, classes: list[Array], num_rows: int
) -> tuple[Array, Array]:
    """Places, and N P(i) of each within its class, of the places of each class."""
    shares = np.full(len(classes), num_rows // max(1, len(classes)))
    shares[rng.permutation(len(classes))[: num_rows - shares.sum()]] += 1
    drawn: list[Array] = [np.empty(0, np.int64)]
    relative: list[Array] = [np.empty(0)]
    for members, share in zip(classes, shares, strict=True):
        passes, rest = divmod(int(share), len(members))
        whole = [np.arange(len(members))] * passes
        if weights is None:
            chosen = np.concatenate([*whole, rng.choice(len(members), rest, replace=False)])
            relative.append(np.ones(len(chosen)))
        else:
            own = weights[members]
            cumulative = np.cumsum(own)
            chosen = np.concatenate([*whole, draw_weighted(rng, own, rest, cumulative)])
            relative.append(own[chosen] * (len(members) / cumulative[-1]))
        drawn.append(members[chosen])
    order = rng.permutation(num_rows)
    return np.concatenate(drawn)[order], np.concatenate(relative)[order]

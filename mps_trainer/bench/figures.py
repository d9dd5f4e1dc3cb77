"""From windows to figures: medians over rounds with their range, shares by pairs of the same round.

A share compares a window with the solo window of its own round and load, so that a machine which slows down for a
minute slows down both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from mps_trainer.bench.arms import find_arm

Raw = Mapping[str, Any]
Spread = dict[str, float]
#: A loss below this is not told from none, and nothing is divided by it.
_LEAST_LOSS = 0.002


def spread(values: Iterable[float]) -> Spread | None:
    """Median and range; None for no values."""
    found = sorted(values)
    if not found:
        return None
    return {"median": median(found), "min": found[0], "max": found[-1], "n": len(found)}


def quantile(values: Sequence[float], share: float) -> float | None:
    """A value that is there: the smallest one that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def rollout_s(window: Raw) -> float:
    """Seconds of its batches, each to its last token; gaps left out."""
    return float(sum(batch["seconds"] for batch in window["batches"]))


def tokens(window: Raw) -> int:
    """Generated in it."""
    return int(sum(batch["tokens"] for batch in window["batches"]))


def figures(session: Raw, *, batch_size: int, engines_here: int) -> list[dict[str, Any]]:
    """One row for each arm and load.

    Args:
        batch_size: experiences of a training step.
        engines_here: GPUs, each of which would have an engine; the arm own-gpu has one less.
    """
    alone = {w["round"]: w["steps"] / w["seconds"] for w in session["alone"]}
    solo = {(w["load"], w["round"]): w for w in session["windows"] if w["arm"] == "none"}
    rows = []
    for load, name in dict.fromkeys((w["load"], w["arm"]) for w in session["windows"]):
        mine = [w for w in session["windows"] if (w["load"], w["arm"]) == (load, name)]
        left = (engines_here - 1) / engines_here if find_arm(name).place == "own" and engines_here > 1 else 1.0
        rows.append(_row(name, load, mine, solo, alone, batch_size, left))
    return rows


def _row(
    name: str,
    load: str,
    mine: Sequence[Raw],
    solo: Mapping[tuple[str, int], Raw],
    alone: Mapping[int, float],
    batch_size: int,
    engines_left: float,
) -> dict[str, Any]:
    kept = [engines_left * rollout_s(solo[load, w["round"]]) / rollout_s(w) for w in mine]
    rate = [w["steps"] / w["seconds"] for w in mine]
    has_trainer = bool(find_arm(name).trainer)
    scores = [ms for w in mine for ms in w.get("score_ms", ())]
    loss = 1 - median(kept)
    per_second = median(rate) * batch_size
    return {
        "arm": name, "load": load, "rounds": len(mine),
        "rollout_kept": spread(kept),
        "tokens_per_s": spread(tokens(w) / rollout_s(w) for w in mine),
        "batch_s": spread(batch["seconds"] for w in mine for batch in w["batches"]),
        "token_ms_p50": spread(median(b["token_ms_p50"] for b in w["batches"]) for w in mine),
        "token_ms_p99": spread(max(b["token_ms_p99"] for b in w["batches"]) for w in mine),
        "steps_per_s": spread(rate) if has_trainer else None,
        "of_dedicated": _shares(mine, rate, alone) if has_trainer else None,
        "experiences_per_percent": per_second / (100 * loss) if has_trainer and loss > _LEAST_LOSS else None,
        "experiences_per_s": per_second if has_trainer else None,
        "score_ms_p50": quantile(scores, 0.5), "score_ms_p99": quantile(scores, 0.99), "scores": len(scores),
        "memory_bytes": {
            side: {kind: max(w["memory_bytes"][side][kind] for w in mine) for kind in ("resident", "gpu")}
            for side in ("engine", "trainer")
        },
        "cpu_per_s": {side: median(w["cpu_s"][side] / w["seconds"] for w in mine) for side in mine[0]["cpu_s"]},
        "outputs": outputs(mine, solo),
    }  # fmt: skip


def _shares(mine: Sequence[Raw], rate: Sequence[float], alone: Mapping[int, float]) -> Spread | None:
    pairs = [(r, alone[w["round"]]) for w, r in zip(mine, rate, strict=True) if alone.get(w["round"])]
    return spread(r / reference for r, reference in pairs)


def outputs(mine: Sequence[Raw], solo: Mapping[tuple[str, int], Raw]) -> dict[str, Any]:
    """Whether an arm's outputs are right: compared batch by batch with the solo window of the same round.

    `differ`: batches whose tokens should be the same and are not; `problems`: what trainers complained of.
    """
    found: dict[str, Any] = {"compared": 0, "differ": 0, "not_finite": 0, "wrong_length": 0, "problems": []}
    for window in mine:
        for batch, reference in zip(window["batches"], solo[window["load"], window["round"]]["batches"], strict=True):
            found["not_finite"] += batch["not_finite"]
            found["wrong_length"] += int(batch["tokens"] != batch["wanted_tokens"])
            if batch["comparable"]:
                found["compared"] += 1
                found["differ"] += int(batch["digest"] != reference["digest"])
        if window.get("problem"):
            found["problems"].append(window["problem"])
        if window.get("pace_source", "engine") != "engine":
            # Of another source there is no measured slowdown, so the arm is not what its name says.
            found["problems"].append(f"the pace went by {window['pace_source'] or 'nothing'}, not by the engine")
    if find_arm(mine[0]["arm"]).trainer and not any(window["steps"] for window in mine):
        found["problems"].append("no training step in any round")
    found["right"] = not (found["differ"] or found["not_finite"] or found["wrong_length"] or found["problems"])
    return found


def idle_cost(closing: Sequence[Raw]) -> list[dict[str, Any]]:
    """What idle processes cost: each closing block against the one after it, from which they are gone."""
    rows = []
    for there, gone in itertools.pairwise(closing):
        cost = median(there["seconds"]) / median(gone["seconds"]) - 1
        rows.append({"idle until": gone["what"], "cost": cost, "with": spread(there["seconds"]),
                     "without": spread(gone["seconds"])})  # fmt: skip
    return rows

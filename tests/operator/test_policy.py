"""When scores count, and what a late one means."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from trinity.common.experience import EID, Experience

from mps_trainer.config import load_settings
from mps_trainer.errors import ConfigError
from mps_trainer.operator.feeder import Exchange
from mps_trainer.operator.policy import ScorePolicy

NAN = float("nan")


def batch(size: int, number: int = 0) -> list[Experience]:
    return [
        Experience(eid=EID(batch=number, task=i // 2, run=i % 2, suffix="0"), tokens=torch.arange(4), reward=1.0)
        for i in range(size)
    ]


def exchange(
    scores: list[float], late: list[int] | tuple[int, ...] = (), version: int = 100, age_s: float = 1.0
) -> Exchange:
    flags = np.zeros(len(scores), dtype=bool)
    flags[list(late)] = True
    trained_ns = time.monotonic_ns() - int(age_s * 1e9)
    return Exchange(
        np.array(scores, np.float32), late=flags, version=version, trained_ns=trained_ns, metrics={"fed": len(scores)}
    )


def policy(**args: Any) -> ScorePolicy:
    return ScorePolicy(load_settings({"use": "filter", "filter": {"drop": "top_k", "value": 1}, **args}))


def test_before_min_version_and_in_the_warm_up_nothing_is_dropped() -> None:
    ours = policy(warmup_steps=2, min_version=50)
    kept = [len(ours.apply(batch(4), exchange([1, 2, 3, 4])).kept) for _ in range(3)]
    assert kept == [4, 4, 3]
    early = policy(min_version=50).apply(batch(4), exchange([1, 2, 3, 4], version=49))
    assert len(early.kept) == 4
    assert early.metrics["score_too_early"] == 1


@pytest.mark.parametrize(("on_late", "kept"), [("pass", [0, 1, 3]), ("last", [0, 1, 3]), ("drop", [0])])
def test_late_scores_by_policy(on_late: str, kept: list[int]) -> None:
    exps = batch(4)
    outcome = policy(on_late=on_late).apply(exps, exchange([1, NAN, 3, NAN], late=[1, 3]))
    assert [exps.index(e) for e in outcome.kept] == kept
    assert outcome.metrics["late"] == 2
    assert outcome.metrics["late_total"] == 2
    assert [why for _, _, why in outcome.dropped if "no score within 2 s" in why] == (
        ["no score within 2 s"] * 2 if on_late == "drop" else []
    )


def test_the_last_score_of_the_same_experience_counts() -> None:
    ours = policy(on_late="last")
    exps = batch(4)
    ours.apply(exps, exchange([1, 2, 3, 9]))
    outcome = ours.apply(exps, exchange([1, NAN, 3, NAN], late=[1, 3]))
    assert [exps.index(e) for e in outcome.kept] == [0, 1, 2], "its last score was the highest"
    assert outcome.metrics["late_from_last"] == 2


def test_the_mean_of_the_last_batch_corrects_the_reward_of_a_late_newcomer() -> None:
    ours = policy(use="reward", reward={"weight": 1}, on_late="last")
    ours.apply(batch(4), exchange([1, 2, 3, 4]))
    late = batch(2, number=1)
    outcome = ours.apply(late, exchange([NAN, 5], late=[0]))
    assert [e.reward for e in outcome.kept] == [1 + 2.5, 1 + 5]


def test_every_score_has_an_age() -> None:
    metrics = policy().apply(batch(2), exchange([1, 2], age_s=20)).metrics
    assert 20 <= metrics["score_age_s"] < 60
    assert "score_stale" not in metrics, "no limit was set"
    assert "score_age_s" not in policy().apply(batch(2), exchange([NAN, NAN], late=[0, 1], version=-1)).metrics


@pytest.mark.parametrize(("on_late", "num_kept"), [("pass", 4), ("last", 4), ("drop", 1)])
def test_scores_that_are_too_old_count_as_late(on_late: str, num_kept: int) -> None:
    ours = policy(on_late=on_late, max_staleness="60s")
    fresh = ours.apply(batch(4), exchange([1, 2, 3, 4]))
    assert len(fresh.kept) == 3
    assert fresh.metrics["score_stale"] == 0
    outcome = ours.apply(batch(4, number=1), exchange([1, 2, 3, 4], age_s=100))
    assert len(outcome.kept) == num_kept
    assert outcome.metrics["score_stale"] == outcome.metrics["score_stale_total"] == 4
    assert outcome.metrics["late"] == 0, "they came in time"
    assert all("s old (max_staleness 60 s)" in why for _, _, why in outcome.dropped)
    assert all(type(value) in (int, float) for value in outcome.metrics.values()), "Trinity drops every other type"


def test_a_remembered_score_goes_on_growing_older(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, exps = policy(on_late="last", max_staleness="60s"), batch(4)
    ours.apply(exps, exchange([1, 2, 3, 9], age_s=10))
    late = exchange([1, NAN, 3, NAN], late=[1, 3])
    young = ours.apply(exps, late)
    assert [exps.index(e) for e in young.kept] == [0, 1, 2]
    assert 10 <= young.metrics["last_score_age_s"] < 60
    now_ns = time.monotonic_ns()
    monkeypatch.setattr("mps_trainer.operator.policy.time.monotonic_ns", lambda: now_ns + int(55e9))
    old = ours.apply(exps, late)
    assert [exps.index(e) for e in old.kept] == [0, 1, 3], "of those with a score that counts the highest goes"
    assert old.metrics["late_from_last"] == 0


def test_too_early_and_too_old_is_too_early() -> None:
    ours = policy(max_staleness="60s", min_version=50, on_late="drop")
    outcome = ours.apply(batch(4), exchange([1, 2, 3, 4], version=49, age_s=100))
    assert len(outcome.kept) == 4
    assert outcome.metrics["score_too_early"] == 1


def test_an_experience_that_could_not_be_fed_is_not_late() -> None:
    for on_late in ("last", "drop"):
        exps = batch(3)
        outcome = policy(on_late=on_late).apply(exps, exchange([5, NAN, 1]))
        assert outcome.kept == exps[1:]


def test_a_dead_sidecar_empties_no_batch() -> None:
    ours = policy(on_late="drop")
    assert len(ours.apply(batch(4), exchange([NAN] * 4, version=-1)).kept) == 4, "no sidecar: nobody was asked"
    ours.apply(batch(4), exchange([1, 2, 3, 4]))
    silent = ours.apply(batch(4), exchange([NAN] * 4, late=range(4), version=-1))  # type: ignore[arg-type]
    assert len(silent.kept) == 1, "keep_at_least"
    assert len(ours.apply(batch(4), exchange([NAN] * 4, version=-1)).kept) == 4


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"filter": {"drop": "top_k", "value": 0.5}}, "whole number"),
        ({"filter": {"drop": "quantile", "value": 1}}, "quantile is a share"),
        ({"reward": {"clip": [1, 0]}}, "lowest comes first"),
        ({"on_late": "skip"}, "on_late"),
    ],
)
def test_settings_that_make_no_sense_are_refused(args: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_settings(args)

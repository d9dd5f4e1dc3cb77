"""It learns on the real stream: explorer, pipeline, operator, ring, sidecar, scores back.

The reward depends on the response's tokens by a rule drawn at random, with noise: 5 % of the rewards are flipped,
the planted outliers. The AUC is taken on each batch before the sidecar trains on it.
"""

from __future__ import annotations

import secrets
from statistics import mean

import pytest
from aux_runs import MPS_RUN, lines, metric, operator, run_folder
from trinity_harness import TrinityRun

from mps_trainer.run import State, Status

SEED = secrets.randbelow(10**6)  # printed by pytest when a test fails: the assertions carry it


def aucs(config) -> list[float]:
    return [line["auc"] for line in lines(run_folder(config) / "metrics.jsonl") if line.get("auc") is not None]


def test_the_classifier_learns_a_random_rule_and_the_filter_drops_planted_outliers(trinity_run: TrinityRun) -> None:
    filter_args = {"drop": "quantile", "value": 0.05}
    config = trinity_run.write_config(
        "explore", operators=[operator(use="filter", filter=filter_args)], steps=14, rule={"seed": SEED, "noise": 0.05}
    )
    before = config.read_bytes()
    with trinity_run.engine(config):
        outcome = trinity_run.run(config, command=MPS_RUN)
    assert outcome.returncode == 0, outcome.report()
    assert config.read_bytes() == before, "the user's file was edited"

    learned = aucs(config)
    assert abs(learned[0] - 0.5) < 0.15, (SEED, learned)
    assert mean(learned[-3:]) >= 0.9, (SEED, learned)

    batches = lines(run_folder(config) / "operator.jsonl")
    dropped = [entry for batch in batches for entry in batch["dropped"]]
    late = [entry for batch in batches[-6:] for entry in batch["dropped"]]
    assert mean(entry["info"]["planted"] for entry in late) > 0.5, (SEED, late)
    assert all(entry["why"] and entry["eid"] for entry in dropped)
    assert len(outcome.rows()) == 14 * 256 - len(dropped)
    assert sum(metric(outcome, "filtered")) == len(dropped)
    assert metric(outcome, "fed") == [256.0] * 14

    status = Status.load(run_folder(config))
    assert status.state is State.STOPPED
    assert status.experiences == 14 * 256
    assert status.restarts == 0


@pytest.mark.parametrize("rule", [{"shuffle": True}, {"kind": "order"}], ids=["shuffled", "order"])
def test_what_token_statistics_cannot_see_stays_at_chance(trinity_run: TrinityRun, rule) -> None:
    config = trinity_run.write_config(
        "explore", operators=[operator(use="feed")], steps=10, rule={"seed": SEED, "noise": 0.0, **rule}
    )
    with trinity_run.engine(config):
        outcome = trinity_run.run(config, command=MPS_RUN)
    assert outcome.returncode == 0, outcome.report()
    assert abs(mean(aucs(config)[-5:]) - 0.5) < 0.08, (SEED, aucs(config))
    assert len(outcome.rows()) == 10 * 256


def test_mode_both_with_corrected_rewards(trinity_run: TrinityRun) -> None:
    reward = {"how": "add", "weight": -0.5}
    config = trinity_run.write_config("both", operators=[operator(use="reward", reward=reward, min_version=1)], steps=3)
    outcome = trinity_run.run(config, command=MPS_RUN)
    assert outcome.returncode == 0, outcome.report()
    assert [step for step, _ in outcome.scalars("trainer")["actor/grad_norm"]] == [1, 2, 3]
    assert max(row.model_version for row in outcome.rows()) >= 1

    corrected = [e for e in outcome.experiences() if "raw_reward" in e.info]
    assert len(corrected) == sum(metric(outcome, "rewards_corrected")) > 0
    for experience in corrected:
        assert experience.info["raw_reward"] in (0.0, 1.0)
        assert experience.info["raw_reward"] - 0.5 <= experience.reward <= experience.info["raw_reward"]

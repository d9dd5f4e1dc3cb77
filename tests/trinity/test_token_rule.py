"""The known truth behind the other tests: the rule, its noise, and a model whose responses differ and repeat."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

from cpu_rollout.sampling import RequestChance, Response, sample_responses
from cpu_rollout.tiny_model import build_model, build_tokenizer, prompt_ids, sample_for_calibration
from cpu_rollout.token_rule import RuleSettings, TokenRule, judge


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On few busy cores two threads wait for each other longer than a model of this size takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def calibration() -> list[list[int]]:
    tokenizer = build_tokenizer()
    return sample_for_calibration(build_model(tokenizer, seed=0), tokenizer)


def make_rule(calibration: list[list[int]], **settings: object) -> TokenRule:
    return TokenRule(RuleSettings(**settings), 512, calibration)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["share", "order"])
@pytest.mark.parametrize("seed", range(4))
def test_both_classes_are_common(calibration: list[list[int]], kind: str, seed: int) -> None:
    rule = make_rule(calibration, kind=kind, seed=seed)
    assert 0.3 < sum(map(rule.holds, calibration)) / len(calibration) < 0.7


def test_share_does_not_see_the_order_and_order_does_not_see_the_bag(calibration: list[list[int]]) -> None:
    rng = random.Random(0)
    share, order = make_rule(calibration, kind="share", seed=1), make_rule(calibration, kind="order", seed=1)
    changed = 0
    for tokens in calibration:
        shuffled = rng.sample(tokens, len(tokens))
        assert share.holds(shuffled) == share.holds(tokens)
        changed += order.holds(shuffled) != order.holds(tokens)
    assert 0.4 < changed / len(calibration) < 0.6


def test_noise_flips_its_share_of_rewards_and_says_so(calibration: list[list[int]]) -> None:
    rule = make_rule(calibration, seed=1, noise=0.1)
    verdicts = [judge(rule, tokens, str(i)) for i, tokens in enumerate(calibration)]
    for tokens, verdict in zip(calibration, verdicts, strict=True):
        assert verdict.planted == (verdict.reward != float(rule.holds(tokens)))
    assert 0.05 < sum(v.planted for v in verdicts) / len(verdicts) < 0.15
    assert verdicts == [judge(rule, tokens, str(i)) for i, tokens in enumerate(calibration)]


def test_shuffled_rewards_follow_nothing(calibration: list[list[int]]) -> None:
    rule, truth = make_rule(calibration, seed=1, shuffle=True), make_rule(calibration, seed=1)
    agree = sum(judge(rule, tokens, str(i)).reward == truth.holds(tokens) for i, tokens in enumerate(calibration))
    assert 0.4 < agree / len(calibration) < 0.6


@pytest.mark.parametrize("wrong", [{"kind": "bag"}, {"noise": 0.5}, {"noise": -0.1}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rule\.(kind|noise)"):
        RuleSettings(**wrong)  # type: ignore[arg-type]


def test_the_engine_repeats_itself_across_runs_and_not_within_one() -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    first, second = (prompt_ids(tokenizer, text) for text in ("The river.", "The engine."))

    def run(order: list[list[int]]) -> dict[int, list[list[Response]]]:
        chance = RequestChance()
        answers: dict[int, list[list[Response]]] = {0: [], 1: []}
        for prompt in order:
            drawn = sample_responses(model, prompt, 4, 16, 1.0, chance.generator(prompt))
            answers[int(prompt is second)].append(drawn)
        return answers

    answers = run([first, first, second])
    assert answers[0][0] != answers[0][1], "the second request for a prompt got the answers of the first"
    assert run([second, first, first]) == answers

from __future__ import annotations

import json
from typing import Any

import numpy as np
from real_sidecar import token_rows

from mps_trainer.columns import PackedBatch
from mps_trainer.config import load_settings
from mps_trainer.sidecar.auc import area_under_curve
from mps_trainer.sidecar.learner import Learner, RecordName
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import decode_batch, encode_batch

TASK = load_task("preference_classifier", {"max_tokens": 64, "num_buckets": 64, "hidden_size": 16})
COLUMNS = wire_columns(TASK)


def new_learner(**settings: Any) -> Learner:
    settings = {"steps_per_batch": 3, "min_experiences": 10, "batch_size": 16} | settings
    return Learner(Trainer(TASK, 16, 0), ReplayBuffer(COLUMNS, 100, 0), load_settings(settings))


def batch(size: int, first: int = 0) -> PackedBatch:
    return decode_batch(encode_batch(token_rows(np.random.default_rng(first), size, first), COLUMNS), COLUMNS)


def name(request: int, part: int = 0, parts: int = 1, channel: str = "a", seq: int = 0) -> RecordName:
    return RecordName(channel, seq or 10 * request + part, request, part, parts, sent_ns=request)


def test_steps_fall_due_with_the_last_part() -> None:
    learner = new_learner()
    learner.take(name(1, 0, 3), batch(10))
    learner.take(name(1, 1, 3), batch(10, 10))
    assert (learner.steps_due, learner.batch_is_in, learner.counters.batches) == (0, False, 0)
    learner.take(name(1, 2, 3), batch(10, 20))
    assert (learner.steps_due, learner.batch_is_in, learner.counters.batches) == (3, True, 1)


def test_a_batch_whose_last_part_was_dropped_has_its_steps_with_the_next_one_or_at_the_end() -> None:
    learner = new_learner()
    learner.take(name(1, 0, 2), batch(20))
    learner.take(name(2, 0, 2), batch(20, 20))
    assert (learner.steps_due, learner.counters.batches) == (3, 1)
    learner.finish_open_batches()
    assert (learner.steps_due, learner.counters.batches) == (6, 2)


def test_batches_of_two_operators_do_not_mix() -> None:
    learner = new_learner()
    learner.take(name(1, 0, 2, "a"), batch(20))
    learner.take(name(1, 0, 2, "b"), batch(20, 20))
    assert learner.counters.batches == 0
    learner.take(name(1, 1, 2, "b"), batch(20, 40))
    assert learner.counters.batches == 1


def test_no_steps_before_there_are_enough_experiences() -> None:
    learner = new_learner(min_experiences=30)
    learner.take(name(1), batch(20))
    assert learner.steps_due == 0
    learner.take(name(2), batch(20, 20))
    assert learner.steps_due == 3


def test_duplicates_are_counted_and_a_record_is_known_by_its_clock_too() -> None:
    learner = new_learner()
    assert learner.take(name(1), batch(20)) == 20
    assert learner.take(name(2), batch(25)) == 5
    assert (learner.counters.experiences, learner.counters.duplicates) == (45, 20)
    assert learner.knows(name(1))
    assert not learner.knows(name(3, seq=10))


def test_state_survives_json_and_arrays() -> None:
    learner, successor = new_learner(), new_learner()
    for learner_batch in range(3):
        learner.evaluate(batch(20, 20 * learner_batch))
        learner.take(name(learner_batch, 0, 2), batch(20, 20 * learner_batch))
    arrays, state = learner.state()
    successor.load_state(arrays, json.loads(json.dumps(state)))
    assert successor.counters == learner.counters
    assert successor.knows(name(2, 0, 2))
    successor.evaluate(batch(20, 90))
    learner.evaluate(batch(20, 90))
    assert successor.counters.auc == learner.counters.auc
    successor.take(name(2, 1, 2), batch(20, 90))
    assert successor.counters.batches == 3, "the open batch was remembered"


def test_the_auc_of_a_batch_covers_all_its_parts() -> None:
    learner = new_learner()
    assert learner.close_batch() is None
    pairs = []
    for part in range(2):
        learner.evaluate(batch(20, 20 * part))
        learner.take(name(1, part, 2), batch(20, 20 * part))
        pairs.append(learner.trainer.evaluate(batch(20, 20 * part)) or ())
    expected = area_under_curve(*map(np.concatenate, zip(*pairs, strict=True)))
    assert learner.close_batch() == expected == learner.counters.first_auc

"""What is generated: lengths, gaps, recorded loads, and what the trainers are given."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from mps_trainer.bench.load import Batch, Load, Request, Shape, long_tailed, read_trace, write_trace
from mps_trainer.bench.work import WORKS, find_work, made_up
from mps_trainer.errors import ConfigError
from mps_trainer.tasks import load_task, wire_columns

SHAPE = Shape(sequences=400, prompt=32, median=50, spread=0.6, longest=500)


def test_lengths_have_a_long_tail_that_every_batch_waits_for() -> None:
    load = long_tailed(SHAPE, 3, 0.1)
    for batch in load.batches:
        lengths = sorted(request.response_tokens for request in batch.requests)
        assert lengths[-1] == 500
        assert 40 < lengths[200] < 60
        assert lengths[-1] > 3 * lengths[360]
        assert batch.arrives_at_once
        assert batch.tokens == sum(lengths)


def test_the_same_seed_gives_the_same_batches_and_batches_differ() -> None:
    assert long_tailed(SHAPE, 2, 0.0, seed=3) == long_tailed(SHAPE, 2, 0.0, seed=3)
    first, second = long_tailed(SHAPE, 2, 0.0).batches
    assert first.requests != second.requests
    assert first.seed != second.seed


@pytest.mark.parametrize("gap", [0.0, 0.1, 0.3])
def test_a_gap_is_that_share_of_the_solo_cycle(gap: float) -> None:
    load = long_tailed(SHAPE, 1, gap)
    silent = load.gap_s(load.batch(0), alone_s=7.0)
    assert silent / (silent + 7.0) == pytest.approx(gap)


def test_a_gap_that_is_no_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="gap"):
        long_tailed(SHAPE, 1, 1.0)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    batches = (Batch(0, 1, (Request(0.0, 5, 7), Request(1.5, 6, 8)), 2.0), Batch(1, 2, (Request(0.0, 5, 9),), 0.0))
    write_trace(Load("recorded", batches), tmp_path / "trace.jsonl")
    found = read_trace(tmp_path / "trace.jsonl")
    assert [batch.requests for batch in found.batches] == [batch.requests for batch in batches]
    assert found.gap_s(found.batches[0], alone_s=99.0) == 2.0
    assert not found.batches[0].arrives_at_once


def test_a_recording_of_a_real_run_gives_its_lengths() -> None:
    load = read_trace(Path(__file__).parents[2] / "examples/port_your_operator/experiences.jsonl")
    assert len(load.batches) > 1
    assert {request.prompt_tokens for batch in load.batches for request in batch.requests} == {2}
    assert all(batch.arrives_at_once for batch in load.batches)


NO_PROMPT = '{"batch": 0, "arrival_s": 0, "prompt_tokens": 0, "response_tokens": 1}'


@pytest.mark.parametrize("line", ["{", '{"batch": 0}', NO_PROMPT])
def test_a_line_that_is_no_rollout_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "t").write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize("name", WORKS)
def test_made_up_experiences_fit_the_columns_and_have_new_ids(name: str) -> None:
    work = find_work(name, {})
    columns = wire_columns(load_task(work.task, work.task_args))
    records = list(itertools.islice(made_up(columns, 8, [3, 5000], "p"), 6))
    assert len({eid for rows in records for eid in rows["eid"]}) == 48
    for column in columns:
        values = records[0][column.name]
        assert len(values) == 8
        if column.kind == "ragged":
            assert [len(row) for row in values[:2]] == [3, min(5000, column.maximum or 0)]
        elif column.kind == "vector":
            assert np.asarray(values).shape == (8, column.width)
    ring = work.ring(columns)
    assert ring.slot_bytes > work.rows * sum(column.max_row_bytes for column in columns)


def test_an_unknown_task_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="there is no task 'C'") as caught:
        find_work("C", {})
    assert "preference_classifier" in caught.value.todo

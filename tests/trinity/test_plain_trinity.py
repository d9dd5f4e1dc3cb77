"""Trinity without our operator, in both modes: what the other tests here stand on."""

from __future__ import annotations

import pytest
from trinity_harness import TrinityRun


def test_explore_without_an_operator(trinity_run: TrinityRun) -> None:
    config = trinity_run.write_config("explore", operators=[], steps=2, tasks=4, repeats=8)
    with trinity_run.engine(config):
        outcome = trinity_run.run(config)
    assert not outcome.error_lines(), outcome.report()
    rows = outcome.rows()
    assert len(rows) == 2 * 4 * 8, outcome.report()
    assert {row.reward for row in rows} == {0.0, 1.0}
    counts = outcome.scalars("explorer")["experience_pipeline/experience_count"]
    assert [value for _, value in counts] == [32.0, 32.0]


def test_both_without_an_operator(trinity_run: TrinityRun) -> None:
    config = trinity_run.write_config("both", operators=[], steps=3, tasks=4, repeats=4)
    outcome = trinity_run.run(config)
    assert not outcome.error_lines(), outcome.report()
    assert [step for step, _ in outcome.scalars("trainer")["actor/grad_norm"]] == [1, 2, 3], outcome.report()
    # The explorer rolled out with weights that the trainer had changed.
    assert max(row.model_version for row in outcome.rows()) >= 1


def test_a_failed_run_is_noticed(trinity_run: TrinityRun) -> None:
    config = trinity_run.write_config("explore", operators=[{"name": "no.such.Operator"}], steps=1, tasks=2)
    with trinity_run.engine(config):
        outcome = trinity_run.run(config)
    assert outcome.returncode == 0, "Trinity now tells failures by its exit status: simplify the harness"
    assert outcome.error_lines() or "no.such" in outcome.output
    with pytest.raises(Exception, match=r"no such table|unable to open"):
        outcome.rows()

"""Trinity without our operator. That it works, the tests of the main job show; here is how it fails."""

from __future__ import annotations

import pytest
from trinity_harness import TrinityRun


def test_a_failed_run_is_noticed(trinity_run: TrinityRun) -> None:
    config = trinity_run.write_config("explore", operators=[{"name": "no.such.Operator"}], steps=1, tasks=2)
    with trinity_run.engine(config):
        outcome = trinity_run.run(config)
    assert outcome.returncode == 0, "Trinity now tells failures by its exit status: simplify the harness"
    assert outcome.error_lines() or "no.such" in outcome.output
    with pytest.raises(Exception, match=r"no such table|unable to open"):
        outcome.rows()

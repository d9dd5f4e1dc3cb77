"""`mps-trainer run` exits with the truth, although `trinity run` exits 0 on failure."""

from __future__ import annotations

import contextlib
import sqlite3

from aux_runs import MPS_RUN, operator, run_folder
from trinity_harness import TrinityRun

from mps_trainer.run import State, Status

SMALL = {"steps": 3, "tasks": 2, "repeats": 4}

BROKEN_TASK = """
from mps_trainer.tasks.preference_classifier import PreferenceClassifier

class Broken(PreferenceClassifier):
    calls = 0

    def loss(self, model, batch):
        Broken.calls += 1
        if Broken.calls > 2:  # the first is the dry step before READY
            raise ValueError("a bad label")
        return super().loss(model, batch)
"""

# Ends like a shell that runs Trinity, and says what Trinity itself answered.
TRINITY_ALONE = ["bash", "-c", 'trinity run --config "$0"; echo "trinity said $?"']


def test_a_failed_trinity_is_told(trinity_run: TrinityRun) -> None:
    config = trinity_run.write_config("explore", operators=[operator(), {"name": "no.such.Operator"}], **SMALL)
    with trinity_run.engine(config):
        outcome = trinity_run.run(config, command=MPS_RUN)
        plain = trinity_run.run(config, command=TRINITY_ALONE)
    assert outcome.returncode == 1, outcome.report()
    assert "no.such" in outcome.output
    assert "trinity said 0" in plain.output, "Trinity now tells failures by its exit status: simplify the verdict"
    with contextlib.suppress(sqlite3.OperationalError):  # no such table
        assert outcome.rows() == []


def test_a_task_that_fails_ends_the_sidecar_and_not_the_run(trinity_run: TrinityRun) -> None:
    (trinity_run.work_dir / "broken_task.py").write_text(BROKEN_TASK)
    block = operator(use="filter", task="broken_task:Broken", min_experiences=1)
    config = trinity_run.write_config("explore", operators=[block], **SMALL)
    # The actors must find the module as the sidecar does; Ray's workers take the driver's folder as their own.
    path = f"{trinity_run.work_dir}:{trinity_run.environment['PYTHONPATH']}"
    with trinity_run.engine(config):
        outcome = trinity_run.run(config, command=MPS_RUN, extra_env={"PYTHONPATH": path})
    assert outcome.returncode == 3, outcome.report()
    assert len(outcome.rows()) == 3 * 8, "the rollout goes on without the sidecar"
    status = Status.load(run_folder(config))
    assert status.state is State.FAILED
    assert "a bad label" in status.error
    assert "experiences 1/" in status.error

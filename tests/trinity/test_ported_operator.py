"""The ported operator of examples/port_your_operator on a real `trinity run`: it learns, and its filter is used."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import mean

from aux_runs import MPS_RUN, lines, metric, operator, run_folder
from trinity_harness import TrinityRun

from mps_trainer.run import Status

EXAMPLE = Path(__file__).parents[2] / "examples/port_your_operator"
STEPS, BATCH, WIDTH = 12, 128, 32


def test_the_ported_operator_filters_a_real_run_by_what_it_learnt(trinity_run: TrinityRun) -> None:
    block = operator(
        task="after:OutlierRewardFilter", task_args={"input_dim": WIDTH}, use="filter", filter={"value": 0.05},
        steps_per_batch=8, min_version=24, score_timeout="60s",
    )  # fmt: skip
    config = trinity_run.write_config(
        "explore", operators=[block], steps=STEPS, tasks=8, repeats=BATCH // 8, rule={"seed": 3, "noise": 0.05},
        set_keys={"buffer.explorer_input.taskset.workflow_args.hidden_state": WIDTH},
    )  # fmt: skip
    # Where the README of the example says `install it, or put its folder on PYTHONPATH before ray start`: this Ray is
    # older than the test, and its workers take the driver's folder as their own.
    shutil.copy(EXAMPLE / "after.py", trinity_run.work_dir)
    path = f"{trinity_run.work_dir}:{trinity_run.environment['PYTHONPATH']}"
    with trinity_run.engine(config):
        outcome = trinity_run.run(config, command=MPS_RUN, extra_env={"PYTHONPATH": path})
    assert outcome.returncode == 0, outcome.report()
    assert Status.load(run_folder(config)).experiences == STEPS * BATCH
    aucs = [line["auc"] for line in lines(run_folder(config) / "metrics.jsonl") if line.get("auc") is not None]
    assert mean(aucs[-3:]) > 0.8, aucs
    dropped = [entry for batch in lines(run_folder(config) / "operator.jsonl") for entry in batch["dropped"]]
    assert len(dropped) == sum(metric(outcome, "filtered")) > 0
    assert len(outcome.rows()) == STEPS * BATCH - len(dropped)
    # 5 % were flipped: a filter that drops at random would find as few among the dropped.
    assert mean(entry["info"]["planted"] for entry in dropped) > 0.3, dropped

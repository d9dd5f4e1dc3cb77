"""`enabled: false` is as if the operator were not there."""

from __future__ import annotations

import torch
from aux_runs import MPS_RUN, metric, operator
from trinity_harness import RunOutcome, TrinityRun

# The six random digits at an experience's end of name differ between any two runs, and so do measured times.
UNEQUAL_BY_NATURE = {"eid", "metrics"}


def by_name(outcome: RunOutcome) -> dict[str, dict]:
    found = {}
    for experience in outcome.experiences():
        eid = experience.eid
        name = f"{eid.batch}/{eid.task}/{eid.run}/{eid.step}"
        fields = {k: v for k, v in vars(experience).items() if k not in UNEQUAL_BY_NATURE}
        metrics = {k: v for k, v in experience.metrics.items() if not k.startswith("time/")}
        found[name] = {**fields, "metrics without times": metrics}
    return found


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def test_experiences_reach_the_trainer_equal_field_by_field(trinity_run: TrinityRun) -> None:
    outcomes = []
    for operators in ([], [operator(enabled=False, use="filter")]):
        config = trinity_run.write_config("explore", operators=operators, steps=2, tasks=4, repeats=8)
        with trinity_run.engine(config):
            # The second goes through `mps-trainer run`, which must hand over to Trinity and start nothing.
            outcomes.append(trinity_run.run(config, command=MPS_RUN if operators else None))
        assert not config.with_suffix(".mps.yaml").exists()
        assert list(config.parent.glob("checkpoints/*/*.mps-trainer")) == [], "no run, so no shared memory either"
    assert metric(outcomes[1], "enabled") == [0.0, 0.0]
    without, disabled = (by_name(outcome) for outcome in outcomes)
    assert len(without) == 64, outcomes[0].report()
    assert without.keys() == disabled.keys()
    for name, fields in without.items():
        different = [key for key, value in fields.items() if not equal(value, disabled[name][key])]
        assert different == [], name

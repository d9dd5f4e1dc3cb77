"""Back-pressure with a slow reader while processes are killed: delivered or counted as dropped, to the record."""

import random

import pytest
from pressure import POLICIES, exact_trial, pressure_trial


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trial", [pressure_trial, exact_trial])
def test_every_record_is_delivered_or_counted_as_dropped(run_id, policy, trial):
    rng = random.Random(5)
    for _ in range(6):
        trial(run_id, policy, rng)

"""A sidecar that is killed at any step, and its successor, arrive at the weights of an unbroken run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from plain_loop import assert_same_weights, newest_weights, train_plainly
from real_sidecar import token_rows
from warm_sidecar import WarmSidecars

from mps_trainer.run.exit_codes import OK

NUM_BATCHES = 8

# Two deaths a test: the successor's start is what takes the time. A checkpoint is due every four batches.
DEATHS = [
    ("append before 2", "append after 1"),
    ("append torn 3", "take before 1"),
    ("take after 2", "release before 3"),
    ("release after 1", "train_step before 2"),
    ("train_step after 5", "evaluate after 1"),
    ("begin_next after 1", "save_file after 1"),
    ("save_checkpoint before 1", "save_checkpoint after 1"),
    ("save_file before 3", "drop_before before 2"),
    ("drop_before after 2", "train_step after 1"),
]


@pytest.fixture(scope="module")
def sidecars() -> Iterator[WarmSidecars]:
    with WarmSidecars() as parent:
        yield parent


@pytest.mark.parametrize("deaths", DEATHS, ids=lambda deaths: ", ".join(deaths))
def test_the_successor_arrives_at_the_same_weights(
    make_run: Any, sidecars: WarmSidecars, deaths: tuple[str, str]
) -> None:
    run = make_run(batch_size=64, steps_per_batch=2, checkpoint_every=8, replay_capacity=300, seed=3)
    rng = np.random.default_rng(1)
    batches = [token_rows(rng, 60, first=60 * i) for i in range(NUM_BATCHES)]
    with run.channel(num_slots=16) as channel:
        for request, rows in enumerate(batches):
            assert channel.send(rows, request_id=request, want_scores=False).rows_sent == 60
        for death in deaths:
            pid = sidecars.start(run.paths.run_file, run.run_dir / "sidecar.log", death)
            assert sidecars.exit_code(pid, wait=True) == -signal.SIGKILL
        child, ready = run.start()
        assert ready == {"state": "ready"}
        child.send_signal(signal.SIGTERM)
        assert child.wait(90) == OK
    assert_same_weights(newest_weights(run.run_dir), train_plainly(run.settings, batches))
    status = run.status()
    assert (status.batches, status.experiences, status.version) == (NUM_BATCHES, 60 * NUM_BATCHES, 2 * NUM_BATCHES)
    assert ("torn" in "".join(deaths)) == ("torn tail" in run.log())

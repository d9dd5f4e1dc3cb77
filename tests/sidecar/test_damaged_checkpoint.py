"""A newest checkpoint that cannot be read: the one before it and the journal give the very same weights."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
from plain_loop import assert_same_weights, newest_weights, train_plainly
from real_sidecar import token_rows
from sidecar_waits import wait_until

from mps_trainer.run.exit_codes import OK

NUM_BATCHES = 7


def test_the_successor_falls_back_and_loses_no_acknowledged_experience(make_run: Any) -> None:
    run = make_run(batch_size=32, steps_per_batch=2, checkpoint_every=4, replay_capacity=300, seed=5)
    rng = np.random.default_rng(2)
    batches = [token_rows(rng, 60, first=60 * i) for i in range(NUM_BATCHES)]
    folder = run.run_dir / "checkpoints"
    with run.channel(num_slots=8) as channel:
        child, _ = run.start()
        run.wait_for_attach(channel)
        for request, rows in enumerate(batches):
            assert channel.send(rows, request_id=request, want_scores=False).rows_sent == 60
        wait_until(lambda: run.status().batches == NUM_BATCHES)
        child.kill()
        assert child.wait(90) == -signal.SIGKILL
        assert {path.name for path in folder.glob("step-*")} == {"step-8", "step-12"}
        os.truncate(folder / "step-12" / "model.safetensors", 100)
        successor, _ = run.start()
        assert run.status().resumed_from == 8
        successor.send_signal(signal.SIGTERM)
        assert successor.wait(90) == OK
    assert_same_weights(newest_weights(run.run_dir), train_plainly(run.settings, batches))
    status = run.status()
    assert (status.version, status.batches, status.experiences) == (14, NUM_BATCHES, 60 * NUM_BATCHES)
    # It is out of the way of those that are counted and kept.
    assert {path.name for path in folder.iterdir()} == {"damaged-step-12", "step-12", "step-14"}

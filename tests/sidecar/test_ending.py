"""How lives end: in time, with nothing lost, and told as what they were."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_loop import assert_same_weights, newest_weights, train_plainly
from real_sidecar import SMALL_TASK, Run, token_rows
from sidecar_waits import wait_until

from mps_trainer.run import State
from mps_trainer.run.exit_codes import CRASHED, FINAL, OK
from mps_trainer.transport import OperatorChannel, leftovers

CHANGED = (sys.executable, str(Path(__file__).parent / "changed.py"))
NUM_BATCHES = 6


@pytest.fixture
def slow_run(make_run: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Run:
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(request.path.parent))
    task = {"task": "slow_task:SlowClassifier", **SMALL_TASK}
    run: Run = make_run(**task, batch_size=32, steps_per_batch=2, min_experiences=1, checkpoint_every=1000)
    return run


def send_batches(channel: OperatorChannel) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    batches = [token_rows(rng, 40, first=40 * i) for i in range(NUM_BATCHES)]
    for request, rows in enumerate(batches):
        assert channel.send(rows, request_id=request, want_scores=False).rows_sent == 40
    return batches


def end(child: Any) -> None:
    """Ask it to end, in order."""
    child.send_signal(signal.SIGTERM)
    assert child.wait(120) == OK


def test_an_end_amid_slow_steps_comes_in_time_and_a_successor_takes_the_rest(
    slow_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = slow_run
    with run.channel(num_slots=8) as channel:
        monkeypatch.setenv("SLOW_STEP_S", "1")
        child, ready = run.start(*CHANGED, "drain", "1")
        assert ready == {"state": "ready"}
        run.wait_for_attach(channel)
        batches = send_batches(channel)
        # Some steps, and 10 s of them to come, of which the drain may take 1 s: not all, however slow the machine is.
        wait_until(lambda: run.status().version > 0)
        end(child)
        stopped = run.status()
        assert stopped.state is State.STOPPED
        assert 0 < stopped.version < 2 * NUM_BATCHES
        assert "training steps were not taken" in run.log()
        assert int(max((run.run_dir / "checkpoints").glob("step-*")).name.removeprefix("step-")) == stopped.version
        monkeypatch.setenv("SLOW_STEP_S", "0")
        successor, _ = run.start()
        assert run.status().resumed_from == stopped.version
        end(successor)
    assert (run.status().version, run.status().batches, run.status().experiences) == (12, 6, 240)
    assert_same_weights(newest_weights(run.run_dir), train_plainly(run.settings, batches))


def test_ready_comes_before_the_journal_is_replayed_and_an_end_amid_that_loses_nothing(
    slow_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = slow_run
    with run.channel(num_slots=8) as channel:
        first, _ = run.start()
        batches = send_batches(channel)
        wait_until(lambda: run.status().batches == NUM_BATCHES)
        first.kill()
        assert first.wait(90) == -signal.SIGKILL
        monkeypatch.setenv("SLOW_STEP_S", "1")
        second, ready = run.start(*CHANGED, "drain", "1")
        assert ready == {"state": "ready"}
        assert run.status().version < NUM_BATCHES, "READY waited for the journal"
        wait_until(lambda: run.status().version > 0)
        end(second)
        assert 0 < run.status().version < 2 * NUM_BATCHES
        monkeypatch.setenv("SLOW_STEP_S", "0")
        third, _ = run.start()
        end(third)
    assert (run.status().version, run.status().batches, run.status().experiences) == (12, 6, 240)
    assert_same_weights(newest_weights(run.run_dir), train_plainly(run.settings, batches))


def test_an_end_before_a_successor_leaves_it_the_names_and_the_last_end_leaves_none(make_run: Any) -> None:
    run = make_run()
    with run.channel() as channel:
        child, _ = run.start()
        run.wait_for_attach(channel)
    run.paths.successor_file.touch()
    end(child)
    assert leftovers(run.run_id) != []
    child, _ = run.start()
    run.paths.successor_file.unlink()
    end(child)
    assert leftovers(run.run_id) == []


def test_a_record_that_the_journal_refuses_goes_to_the_successor(make_run: Any) -> None:
    run = make_run(steps_per_batch=0)
    with run.channel() as channel:
        for request in range(4):
            rows = token_rows(np.random.default_rng(request), 50, 50 * request)
            channel.send(rows, request_id=request, want_scores=False)
        child, _ = run.start(*CHANGED, "full-disk", "2")
        code = child.wait(90)
        assert (code, code in FINAL) == (CRASHED, False)
        assert "no room" in run.log()
        # The supervisor restarts it, so it has not failed for good.
        assert run.status().state is not State.FAILED
        successor, _ = run.start()
        end(successor)
    assert (run.status().experiences, run.status().duplicates) == (200, 0)

"""The real process over a real channel."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
from plain_loop import assert_same_weights, newest_weights, train_plainly
from real_sidecar import token_rows
from sidecar_waits import wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mps_trainer.launcher.leftovers import remove_leftovers
from mps_trainer.run import State, Status
from mps_trainer.run.exit_codes import BAD_CONFIG, OK, TASK_FAILED
from mps_trainer.transport import leftovers


def test_weights_equal_a_plain_loop_in_one_process(make_run: Any) -> None:
    run = make_run(batch_size=64, steps_per_batch=3, replay_capacity=300, seed=7)
    rng = np.random.default_rng(0)
    batches = [token_rows(rng, 100, first=100 * i) for i in range(6)]
    child, ready = run.start()
    assert ready == {"state": "ready"}
    with run.channel() as channel:
        run.wait_for_attach(channel)
        for request, rows in enumerate(batches):
            result = channel.send(rows, request_id=request, want_scores=True)
            assert result.parts_sent == result.parts
            scores = channel.receive_scores(request, timeout_s=90)
            assert scores is not None
            assert scores.values.shape == (100,)
            # Earlier steps may be under way when the request arrives, never later ones.
            assert scores.model_version == 3 * request
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) == OK
    assert_same_weights(newest_weights(run.run_dir), train_plainly(run.settings, batches))
    status = run.status()
    assert (status.state, status.version, status.batches, status.experiences) == (State.STOPPED, 18, 6, 600)
    assert status.trained == 18 * 64
    assert status.scored == 600
    lines = [line for line in run.metrics() if line["kind"] == "batch"]
    assert [line["batch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["auc"] > lines[0]["auc"]
    assert list((run.run_dir / "tensorboard").glob("events.*"))


def test_what_is_in_the_rings_is_taken_before_the_end(make_run: Any) -> None:
    run = make_run(batch_size=32, steps_per_batch=2)
    with run.channel() as channel:
        for request in range(3):
            channel.send(
                token_rows(np.random.default_rng(request), 50, 50 * request), request_id=request, want_scores=False
            )
        child, _ = run.start()
        child.send_signal(signal.SIGTERM)
        assert child.wait(90) == OK
        assert run.status().experiences == 150
        assert run.status().version == 6
        assert channel.sidecar_alive() is False


def test_the_supervisors_death_ends_the_sidecar_and_its_files(make_run: Any) -> None:
    run = make_run()
    child, _ = run.start()
    assert run.paths.sidecar_lock.exists()
    run.supervisor.release()
    assert child.wait(90) == OK
    assert not run.paths.run_file.exists()
    assert "supervisor is gone" in run.log()


def test_a_sidecar_that_ends_alone_leaves_the_run_file_to_a_living_operator(make_run: Any) -> None:
    """By that file the next clean-up knows that the run is over, should the operator be killed."""
    run = make_run()
    child, _ = run.start()
    with run.channel() as channel:
        run.wait_for_attach(channel)
        run.supervisor.release()
        assert child.wait(90) == OK
        assert run.paths.run_file.exists()
        assert not run.paths.sidecar_lock.exists()
    remove_leftovers()
    assert leftovers(run.run_id) == []
    assert not run.paths.run_file.exists()


def test_no_operator_for_the_idle_timeout_ends_it(make_run: Any) -> None:
    run = make_run(idle_timeout=0.5)
    with run.channel() as channel:
        child, _ = run.start()
        with pytest.raises(Exception, match="timed out"):
            child.wait(1.5)
        channel.close()
        assert child.wait(90) == OK
    assert "idle_timeout" in run.log()
    assert run.paths.run_file.exists()


def test_a_second_sidecar_on_a_run_is_refused(make_run: Any) -> None:
    run = make_run()
    run.start()
    second, answer = run.start()
    assert second.wait(90) not in (OK, BAD_CONFIG, TASK_FAILED)
    assert "another sidecar serves" in answer["error"]


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"task": "preference_clasifier", "task_args": {}}, BAD_CONFIG, "preference_clasifier"),
        ({"task": "no_such_pkg:Mine", "task_args": {}}, TASK_FAILED, "does not import"),
        ({"task": "broken_tasks:RaisesInLoss", "task_args": {}}, TASK_FAILED, "no such layer"),
        ({"task": "broken_tasks:WrongShape", "task_args": {}}, TASK_FAILED, "must give a tensor of shape"),
    ],
)
def test_a_task_that_cannot_work_dies_before_ready(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, settings: Any, code: int, words: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent))
    run = make_run(**settings)
    child, answer = run.start()
    assert child.wait(90) == code
    assert answer["state"] == "failed"
    assert words in answer["error"]
    assert answer["todo"]
    assert run.status().state is State.FAILED
    assert words in run.status().error


def test_a_loss_that_becomes_nan_names_step_and_experiences(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent))
    monkeypatch.syspath_prepend(str(request.path.parent))
    run = make_run(task="broken_tasks:NanWhenNegative", task_args={}, min_experiences=1)
    child, ready = run.start()
    assert ready == {"state": "ready"}
    with run.channel() as channel:
        rows = {"eid": ["good"], "group": ["t"], "reward": np.ones(1, np.float32)}
        channel.send(rows, request_id=1, want_scores=False)
        channel.send(rows | {"eid": ["bad"], "reward": -np.ones(1, np.float32)}, request_id=2, want_scores=False)
        assert child.wait(90) == TASK_FAILED
    status = run.status()
    assert status.state is State.FAILED
    assert "step 4" in status.error
    assert "the loss is nan" in status.error
    assert "bad" in status.error


def test_text_columns_and_many_parts(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent))
    monkeypatch.syspath_prepend(str(request.path.parent))
    run = make_run(task="broken_tasks:TextLength", task_args={})
    run.start()
    with run.channel(slot_bytes=2**13) as channel:
        run.wait_for_attach(channel)
        texts = ["x" * (i % 60) for i in range(300)]
        rows = {"eid": [f"e{i}" for i in range(300)], "group": ["t"] * 300, "reward": np.ones(300, np.float32)}
        assert channel.send(rows | {"words": texts}, request_id=1, want_scores=True).parts > 1
        scores = channel.receive_scores(1, timeout_s=90)
        assert scores is not None
        assert scores.values.tolist() == [len(text) for text in texts]


def test_a_long_batch_of_steps_and_a_restart_are_in_the_metrics(make_run: Any) -> None:
    run = make_run(steps_per_batch=120, batch_size=8, checkpoint_every=100, min_experiences=1)
    with run.channel() as channel:
        first, _ = run.start()
        for number in range(2):
            rows = token_rows(np.random.default_rng(number), 20, 20 * number)
            channel.send(rows, request_id=number, want_scores=False)
            wait_until(lambda done=number + 1: run.status().batches == done)
        # The status tells of a batch before its checkpoint is taken.
        wait_until(lambda: (run.run_dir / "checkpoints" / "step-240").exists())
        first.kill()
        assert first.wait(90) == -signal.SIGKILL
        Status(run_id=run.run_id, state=State.RESTARTING, restarts=1, scored=123).save(run.run_dir)
        run.start()
        assert (run.status().restarts, run.status().resumed_from, run.status().version) == (1, 240, 240)
        assert run.status().scored == 123, "a total over the run, which no checkpoint holds"
        channel.send(token_rows(np.random.default_rng(9), 20, 90), request_id=3, want_scores=False)
        wait_until(lambda: run.status().batches == 3)
    kinds = [line["kind"] for line in run.metrics()]
    assert kinds == ["step", "step", "batch"] * 2 + ["resume"] + ["step", "step", "batch"]
    assert [line["step"] for line in run.metrics() if line["kind"] == "batch"] == [120, 240, 360]
    accumulator = EventAccumulator(str(run.run_dir / "tensorboard"))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("sidecar/replay_size")][-1] == 360


def test_a_missing_run_file_is_told(make_run: Any) -> None:
    run = make_run()
    run.paths.run_file.unlink()
    child, answer = run.start()
    assert child.wait(90) == BAD_CONFIG
    assert "no run file" in answer["error"]

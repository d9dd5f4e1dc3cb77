"""The pace of a real sidecar process beside a file of an engine."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
from real_sidecar import token_rows
from sidecar_waits import wait_until

from mps_trainer.run.engine_load import LoadFile
from mps_trainer.run.exit_codes import OK

#: No step beside a busy engine; one that a loaded machine keeps from speaking for a while is not idle.
STARVED = {
    "pace": "on", "max_rollout_slowdown": 1e-6, "min_steps_per_batch": 0, "batch_size": 32, "steps_per_batch": 4,
    "pace_tuning": {"silent": 60},
}  # fmt: skip


def test_real_successor_scores_though_steps_of_the_journal_wait_for_the_pace(make_run: Any) -> None:
    run = make_run(**STARVED)
    engine, idle = LoadFile(run.run_dir, 0, ()), threading.Event()

    def generate() -> None:
        while not idle.wait(0.02):
            engine.write(running=200, waiting=0, tokens=200, prefill=0)
        engine.write(running=0, waiting=0, tokens=0, prefill=0)

    generating = threading.Thread(target=generate)
    generating.start()
    try:
        child, _ = run.start()
        rng = np.random.default_rng(0)
        with run.channel() as channel:
            run.wait_for_attach(channel)
            for number in range(3):
                channel.send(token_rows(rng, 64, 64 * number), request_id=number, want_scores=False)
            wait_until(lambda: run.status().steps_owed == 12)
            child.kill()
            child.wait(90)
            child, _ = run.start()
            channel.send(token_rows(rng, 8, 900), request_id=3, want_scores=True)
            scores = channel.receive_scores(3, timeout_s=90)
            assert scores is not None
            assert scores.model_version == 0
            idle.set()
            wait_until(lambda: run.status().version == 16 and run.status().steps_owed == 0)
    finally:
        idle.set()
        generating.join()
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) == OK
    engine.close()


def test_real_sidecar_yields_to_a_busy_engine_scores_meanwhile_and_trains_when_it_is_idle(make_run: Any) -> None:
    run = make_run(**STARVED)
    engine = LoadFile(run.run_dir, 0, ())
    child, _ = run.start()
    with run.channel() as channel:
        run.wait_for_attach(channel)
        rng = np.random.default_rng(0)

        def busy() -> None:
            engine.write(running=200, waiting=0, tokens=200, prefill=0)

        for number in range(3):
            busy()
            channel.send(token_rows(rng, 64, 64 * number), request_id=number, want_scores=False)
        wait_until(lambda: (busy(), run.status().steps_owed == 12)[1])
        assert run.status().version == 0
        assert [line["batch"] for line in run.metrics() if line["kind"] == "batch"] == [1, 2, 3], "told, though owed"
        assert run.status().pace_source == "engine"
        busy()
        channel.send(token_rows(rng, 8, 900), request_id=3, want_scores=True)
        scores = channel.receive_scores(3, timeout_s=90)
        assert scores is not None
        assert scores.model_version == 0
        busy()
        engine.write(running=0, waiting=0, tokens=0, prefill=0)
        wait_until(lambda: run.status().version == 16 and run.status().steps_owed == 0)
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) == OK
    lines = [line for line in run.metrics() if line["kind"] == "batch"]
    assert lines[-1]["pace_source"] == "engine"
    engine.close()


def test_real_sidecar_ends_beside_a_busy_engine_with_steps_owed_and_its_successor_takes_them(make_run: Any) -> None:
    run = make_run(**STARVED)
    engine = LoadFile(run.run_dir, 0, ())
    child, _ = run.start()
    engine.write(running=200, waiting=0, tokens=200, prefill=0)
    with run.channel() as channel:
        run.wait_for_attach(channel)
        rng = np.random.default_rng(0)
        for number in range(2):
            channel.send(token_rows(rng, 64, 64 * number), request_id=number, want_scores=False)
        wait_until(lambda: run.status().steps_owed == 8)
        child.send_signal(signal.SIGTERM)
        assert child.wait(90) == OK
        assert (run.status().version, run.status().steps_owed) == (0, 8)
        engine.write(running=0, waiting=0, tokens=0, prefill=0)
        child, _ = run.start()
        wait_until(lambda: run.status().version == 8 and run.status().steps_owed == 0)
        assert run.status().steps_skipped == 0
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) == OK
    engine.close()

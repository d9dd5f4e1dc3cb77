"""The real process is paused: it takes nothing, and goes on where it was."""

import signal
import subprocess
import time

import numpy as np
import pytest
from real_sidecar import token_rows

from mps_trainer.mps.folder import mps_folder
from mps_trainer.run import State
from mps_trainer.run.doing import read_beat, read_doing
from mps_trainer.run.exit_codes import OK


def wait_until(condition, what, timeout_s=90):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def wait_for_state(run, state, timeout_s=90):
    end = time.monotonic() + timeout_s
    while run.status().state is not state:
        assert time.monotonic() < end, run.status()
        time.sleep(0.02)


def test_a_sidecar_does_not_end_for_idling_while_an_engine_starts(make_run):
    run = make_run(idle_timeout=0.5)
    folder = mps_folder(run.record.run_id)
    folder.path.mkdir(parents=True)
    try:
        with run.channel() as channel:
            child, _ = run.start()
            run.wait_for_attach(channel)
            folder.set_hold(True)
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1.5)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(2.5)
        # Its end takes longer than that; its decision does not.
        assert "ending:" not in run.log()
        folder.set_hold(False)
        assert child.wait(90) == OK
    finally:
        folder.remove()
    assert "no operator for 0.5 s (idle_timeout)" in run.log()


def test_a_paused_sidecar_neither_scores_nor_trains_and_goes_on_afterwards(make_run):
    run = make_run(batch_size=32, steps_per_batch=2)
    child, _ = run.start()
    folder = mps_folder(run.record.run_id)
    folder.path.mkdir(parents=True)
    try:
        with run.channel() as channel:
            run.wait_for_attach(channel)
            folder.set_pause("process 7 (verl) computes on the sidecar's GPU")
            wait_for_state(run, State.PAUSED)
            assert run.status().error == "process 7 (verl) computes on the sidecar's GPU"
            channel.send(token_rows(np.random.default_rng(0), 50, 0), request_id=1, want_scores=True)
            assert channel.receive_scores(1, timeout_s=1.0) is None
            assert (run.status().version, run.status().experiences) == (0, 0)
            before = read_beat(run.run_dir)
            wait_until(lambda: read_beat(run.run_dir) > before, "a beat: no watchdog may take a pause for a hang")
            wait_until(lambda: str(read_doing(run.run_dir)) == "waiting for records", "it takes nothing")
            folder.set_pause("")
            wait_for_state(run, State.READY)
            channel.send(token_rows(np.random.default_rng(2), 50, 100), request_id=3, want_scores=True)
            assert channel.receive_scores(3, timeout_s=90) is not None
            end = time.monotonic() + 90
            while run.status().version < 4:
                assert time.monotonic() < end
                time.sleep(0.02)
            assert run.status().error == ""
            # Under a pause the end saves everything, and launches nothing for it.
            folder.set_pause("again")
            wait_for_state(run, State.PAUSED)
            channel.send(token_rows(np.random.default_rng(1), 50, 50), request_id=2, want_scores=True)
            child.send_signal(signal.SIGTERM)
            assert child.wait(90) == OK
    finally:
        folder.remove()
    assert run.status().state is State.STOPPED
    assert run.status().version == 4
    assert list((run.run_dir / "journal").glob("*"))
    pauses = [(line["paused"], line["reason"]) for line in run.metrics() if line["kind"] == "pause"]
    assert [paused for paused, _ in pauses] == [1, 0, 1, 0]
    assert "process 7" in pauses[0][1]

"""A run folder that cannot be written to: our own I/O errors end no training and blame no experience."""

from __future__ import annotations

import re
import resource
import signal
from typing import Any

import numpy as np
from real_sidecar import Run, token_rows
from sidecar_waits import wait_until

from mps_trainer.launcher.autopsy import Autopsy
from mps_trainer.run import State, Status
from mps_trainer.run.exit_codes import CRASHED, OK
from mps_trainer.transport import OperatorChannel
from mps_trainer.transport.sweep import remove_run


def send(channel: OperatorChannel, request: int) -> None:
    rows = token_rows(np.random.default_rng(request), 50, 50 * request)
    assert channel.send(rows, request_id=request, want_scores=False).rows_sent == 50


def test_training_goes_on_without_metrics_status_and_checkpoints(make_run: Any) -> None:
    run: Run = make_run(batch_size=32, steps_per_batch=2, min_experiences=1, checkpoint_every=2)
    (run.run_dir / "metrics.jsonl").mkdir()
    (run.run_dir / "checkpoints").touch()
    child, ready = run.start()
    assert ready == {"state": "ready"}
    assert "metrics.jsonl cannot be written" in run.status().trouble
    status = run.run_dir / "status.json"
    with run.channel() as channel:
        run.wait_for_attach(channel)
        for request in range(3):
            send(channel, request)
        wait_until(lambda: run.status().batches == 3)
        assert "a checkpoint cannot be written" in run.status().trouble
        status.rename(run.run_dir / "before.json")
        status.mkdir()
        for request in range(3, 6):
            send(channel, request)
        wait_until(lambda: "status.json cannot be written" in run.log())
        status.rmdir()
        (run.run_dir / "checkpoints").unlink()
        wait_until(lambda: (found := Status.peek(run.run_dir)) is not None and found.batches == 6)
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) == OK
    found = run.status()
    assert (found.state, found.version, found.experiences) == (State.STOPPED, 12, 300)
    assert "checkpoint" not in found.trouble
    assert (run.run_dir / "checkpoints" / "step-12" / "state.json").exists()
    log = run.log()
    assert [log.count(f"{what} cannot be written") for what in ("metrics.jsonl", "status.json", "a checkpoint")] == [
        1, 1, 1,
    ]  # fmt: skip


def test_a_journal_that_refuses_a_record_blames_no_experience(make_run: Any) -> None:
    """What becomes of the record: `test_ending`, "a record that the journal refuses"."""
    run: Run = make_run(batch_size=32, steps_per_batch=2, min_experiences=1)
    with run.channel() as channel:
        child, _ = run.start()
        run.wait_for_attach(channel)
        # A real error of the kernel's for every byte that a file grows by, beyond what `doing` has.
        limit = (run.run_dir / "doing").stat().st_size
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (limit, limit))
        for request in range(4):
            send(channel, request)
        assert child.wait(90) == CRASHED
        problem = Autopsy(run.run_dir).judge(CRASHED)
        assert re.fullmatch(r" \(the journal in .* takes \d+ of \d+ bytes.*\); it was writing its journal, .*", problem)
        assert channel.backlog() >= 1
    assert not (run.run_dir / "verdicts.json").exists()
    assert remove_run(run.run_id)

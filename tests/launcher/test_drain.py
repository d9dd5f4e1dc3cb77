"""An end between two lives of the real sidecar: what is in the ring is not lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from launcher_helpers import kill, wait_for
from real_sidecar import token_rows

from mps_trainer.launcher.process import Ended
from mps_trainer.launcher.up import prepare, start_run
from mps_trainer.run import State
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import OperatorChannel, RingSettings


@pytest.mark.slow
@pytest.mark.usefixtures("long_backoff")
def test_what_is_in_the_ring_is_taken_when_the_run_ends_between_two_lives(write_config: Callable[..., Path]) -> None:
    run = start_run(prepare(write_config()))
    settings = run.record.settings
    columns = wire_columns(load_task(settings["task"], settings["task_args"]))
    rows, ring = token_rows(np.random.default_rng(0), 64), RingSettings(num_slots=4, slot_bytes=2**18)
    channel = OperatorChannel.create(run.record.run_id, columns, ring, backpressure="block", block_timeout_s=90)
    try:
        channel.send({name: values[:32] for name, values in rows.items()}, request_id=1, want_scores=False)
        wait_for(lambda: run.status().experiences == 32, "the first batch")
        kill(run.sidecar_pid, signal.SIGKILL)
        wait_for(lambda: run.status().state is State.RESTARTING, "RESTARTING")
        channel.send({name: values[32:] for name, values in rows.items()}, request_id=2, want_scores=False)
        assert run.stop() is Ended.BY_ITSELF
    finally:
        channel.close()
        run.stop()
    assert run.status().state is State.STOPPED
    assert run.status().experiences == 64
    assert list((run.run_dir / "checkpoints").glob("step-*"))
    assert not list(Path("/dev/shm").glob(f"*mpst.{run.record.run_id}.*"))

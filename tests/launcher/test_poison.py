"""`up` with the real sidecar and a task that one experience kills or hangs: set aside, named, and the run goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from launcher_helpers import wait_for
from poison_tasks import rows

from mps_trainer.launcher.process import Ended
from mps_trainer.launcher.up import RunHandle, prepare, start_run
from mps_trainer.run import State
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import OperatorChannel, RingSettings

Write = Callable[..., Path]
SUPPORT = Path(__file__).resolve().parents[1] / "support"
pytestmark = pytest.mark.slow


@pytest.fixture
def poisoned(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunHandle]:
    """Start a run with a task of poison_tasks.py: `poisoned("Aborts", "score")`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))

    def start(task: str, where: str, **settings: Any) -> RunHandle:
        given = {"task": f"poison_tasks:{task}", "task_args": {"where": where}, "min_experiences": 1, **settings}
        lines = "".join(f"\n          {key}: {json.dumps(value)}" for key, value in given.items())
        return start_run(prepare(write_config(("ready_timeout: 120s", f"ready_timeout: 120s{lines}"))))

    return start


def open_channel(run: RunHandle) -> OperatorChannel:
    settings = run.record.settings
    columns = wire_columns(load_task(settings["task"], settings["task_args"]))
    ring = RingSettings(num_slots=8, slot_bytes=2**14)
    return OperatorChannel.create(run.record.run_id, columns, ring, backpressure="block", block_timeout_s=90)


def kept(run: RunHandle) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run.run_dir / "set_aside").glob("*.json"))]


@pytest.mark.parametrize(
    ("task", "where", "cause"),
    [
        ("Aborts", "score", "SIGABRT"),
        ("Segfaults", "loss", "SIGSEGV"),
        ("AssertsOnDevice", "loss", "device-side assert triggered"),
        ("AssertsOnDevice", "score", "device-side assert triggered"),
        ("KilledFromOutside", "predictions", "SIGKILL"),
        ("Hangs", "score", "hung"),
        ("HangsInC", "loss", "hung"),
    ],
)
def test_the_batch_is_set_aside_and_named_and_later_ones_are_trained_on(
    poisoned: Callable[..., RunHandle], task: str, where: str, cause: str
) -> None:
    hang_timeout = "6s" if task.startswith("Hangs") else "60s"
    run = poisoned(task, where, hang_timeout=hang_timeout, steps_per_batch=2, batch_size=8)
    deaths = 2 if task == "KilledFromOutside" else 1
    with open_channel(run) as channel:
        channel.send(rows(["good1", "good2"]), request_id=1, want_scores=True)
        assert channel.receive_scores(1, timeout_s=90) is not None
        channel.send(rows(["bad", "beside"], marked="bad"), request_id=2, want_scores=True)
        begin = time.monotonic()
        wait_for(lambda: run.status().restarts == deaths and run.status().set_aside, "the batch set aside", 90)
        seconds = time.monotonic() - begin
        channel.send(rows(["good3", "good4"]), request_id=3, want_scores=True)
        scores = channel.receive_scores(3, timeout_s=90)
        assert scores is not None
        wait_for(lambda: run.status().batches >= 2 and not run.status().error, "the later batch")
        status = run.status()
    assert status.state is State.READY
    assert "bad" in status.last_death
    [facts] = kept(run)
    assert "bad" in facts["eids"]
    assert cause in facts["cause"]
    assert facts["deaths"] == deaths
    assert status.set_aside == facts["experiences"]
    [arrow] = (run.run_dir / "set_aside").glob("*.arrow")
    with pa.OSFile(str(arrow)) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.column("eid").to_pylist() == facts["eids"]
    assert -1.0 in table.column("reward").to_pylist()
    log = (run.run_dir / "sidecar.log").read_text()
    assert "set aside in" in log
    if task.startswith("Hangs"):
        assert "strike" in log, "the stacks are not in the log"
        assert "(hang_timeout)" in status.last_death
    assert run.stop() is Ended.BY_ITSELF
    print(f"{task} in {where}: {seconds:.1f} s to the successor, {status.last_death}")


def test_one_that_is_only_slow_drains_and_nothing_is_set_aside(poisoned: Callable[..., RunHandle]) -> None:
    run = poisoned("Slow", "score", hang_timeout="6s", steps_per_batch=1, batch_size=8, probation="off")
    with open_channel(run) as channel:
        channel.send(rows(["slow", "beside"], marked="slow"), request_id=1, want_scores=True)
        for number in range(2, 7):
            channel.send(rows([f"good{number}", f"fine{number}"]), request_id=number, want_scores=True)
        wait_for(lambda: run.status().restarts == 1, "the restart", 90)
        wait_for(lambda: run.status().batches == 6, "all six batches")
        status = run.status()
    assert "it hung for 6 s" in status.last_death
    assert "(experiences slow, beside), and went on" in status.last_death
    assert "too slow for hang_timeout, nothing set aside" in status.last_death
    assert (status.set_aside, kept(run), (run.run_dir / "verdicts.json").exists()) == (0, [], False)
    assert status.experiences == 12
    assert run.stop() is Ended.BY_ITSELF


def test_many_kinds_of_poison_do_not_come_back_after_a_checkpoint(poisoned: Callable[..., RunHandle]) -> None:
    run = poisoned("Aborts", "loss", steps_per_batch=1, batch_size=4, checkpoint_every=2)
    with open_channel(run) as channel:
        for number in range(4):
            eids = [f"{number}-{i}" for i in range(4)]
            channel.send(rows(eids, marked=eids[0] if number in (1, 2) else ""), request_id=number, want_scores=False)
        wait_for(lambda: run.status().batches == 4 and run.status().restarts >= 1, "all batches", 150)
        wait_for(lambda: run.status().state is State.READY, "READY")
    assert run.stop() is Ended.BY_ITSELF
    status = run.status()
    assert (status.state, status.experiences) == (State.STOPPED, 16)
    named = {eid for facts in kept(run) for eid in facts["eids"]}
    assert status.set_aside == sum(facts["experiences"] for facts in kept(run)) == len(named)
    assert status.replay_size == 16 - len(named)

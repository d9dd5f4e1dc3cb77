"""The run survives, and leaves what the table of lifetimes says: real processes, really killed."""

from __future__ import annotations

import pytest
from aux_runs import (
    MPS_RUN,
    alive,
    command,
    kill,
    lines,
    mapping_pids,
    metric,
    operator,
    run_file,
    run_folder,
    shared_memory_of,
    sidecar_pid,
    supervisor_pid,
    up,
    wait_for,
)
from trinity_harness import RunningTrinity, TrinityRun

from mps_trainer.errors import RunError
from mps_trainer.run import State, Status

STEPS, TASKS, REPEATS = 40, 4, 8
BATCH = TASKS * REPEATS


def wait_for_batches(config, count: int, running: RunningTrinity) -> None:
    """Wait until the sidecar has seen `count` batches: the run is in full swing, with most of its steps to come."""

    def seen() -> bool:
        assert running.process.poll() is None, running.outcome().report()
        try:
            return Status.load(run_folder(config)).experiences >= count * BATCH
        except (RunError, AssertionError):  # no run folder or no status yet
            return False

    wait_for(f"{count} batches", seen, 400)


@pytest.fixture
def config(trinity_run: TrinityRun):
    return trinity_run.write_config(
        "explore",
        operators=[operator(use="filter", filter={"value": 0.1}, min_version=1, checkpoint_every=4, idle_timeout="3s")],
        steps=STEPS,
        tasks=TASKS,
        repeats=REPEATS,
    )


def test_no_sidecar_at_all(trinity_run: TrinityRun) -> None:
    steps = 10
    block = operator(use="filter", filter={"value": 0.1}, min_version=1)
    config = trinity_run.write_config("explore", operators=[block], steps=steps, tasks=TASKS, repeats=REPEATS)
    with trinity_run.engine(config):
        outcome = trinity_run.run(config)
    assert not outcome.error_lines(), outcome.report()
    assert len(outcome.rows()) == steps * BATCH, "an absent sidecar must not cost an experience"
    assert metric(outcome, "connected") == [0.0] * steps
    assert metric(outcome, "kept") == [float(BATCH)] * steps


def test_a_killed_sidecar_is_restarted_and_goes_on(trinity_run: TrinityRun, config) -> None:
    with trinity_run.engine(config), trinity_run.start(config, MPS_RUN) as running:
        wait_for_batches(config, 3, running)
        kill(sidecar_pid(config))
        outcome = running.wait(600)
    assert outcome.returncode == 0, outcome.report()
    status = Status.load(run_folder(config))
    assert status.restarts == 1
    assert status.resumed_from is not None
    assert status.state is State.STOPPED
    # Every experience that was fed has been seen, but for those that the ring's policy dropped, and counted, while
    # nobody read it.
    batches = lines(run_folder(config) / "operator.jsonl")
    fed, evicted = (sum(line.get(key, 0) for line in batches) for key in ("fed", "evicted"))
    assert fed == STEPS * BATCH
    assert status.experiences - status.duplicates == fed - evicted
    assert max(metric(outcome, "sidecar_restarts")) == 1
    assert shared_memory_of(config) == []


def test_a_killed_driver_leaves_nothing(trinity_run: TrinityRun, config) -> None:
    """`mps-trainer run` is killed: Trinity, sidecar and supervisor end within seconds."""
    with trinity_run.engine(config), trinity_run.start(config, MPS_RUN) as running:
        wait_for_batches(config, 2, running)
        pids = {sidecar_pid(config), supervisor_pid(config), *mapping_pids(config)}
        assert len(pids) >= 3, "sidecar, supervisor and Trinity's coordinator"
        kill(running.process.pid)
        for pid in pids:
            wait_for("the end of sidecar, supervisor and Trinity", lambda pid=pid: not alive(pid), 90)
    assert Status.load(run_folder(config)).state is State.STOPPED
    assert shared_memory_of(config) == []
    assert not run_file(trinity_run.environment, config).exists()


def test_after_up_a_killed_driver_leaves_the_sidecar_until_it_idles(trinity_run: TrinityRun, config) -> None:
    derived = up(trinity_run, config)
    pid, parent = sidecar_pid(config), supervisor_pid(config)
    with trinity_run.engine(config), trinity_run.start(derived) as running:
        wait_for_batches(config, 2, running)
        kill(running.process.pid)
        running.process.wait(90)
        assert alive(pid), "a sidecar that `up` started outlives the driver"
        wait_for("the idle sidecar's end", lambda: not alive(pid) and not alive(parent), 120)
    assert Status.load(run_folder(config)).state is State.STOPPED
    assert shared_memory_of(config) == []
    assert list((run_folder(config) / "checkpoints").glob("step-*")), "what was learnt is saved"


def test_a_killed_supervisor_leaves_nothing_and_trinity_finishes(trinity_run: TrinityRun, config) -> None:
    derived = up(trinity_run, config)
    pid = sidecar_pid(config)
    with trinity_run.engine(config), trinity_run.start(derived) as running:
        wait_for_batches(config, 2, running)
        kill(supervisor_pid(config))
        wait_for("the sidecar's end", lambda: not alive(pid), 90)
        outcome = running.wait(600)
    assert not outcome.error_lines(), outcome.report()
    assert metric(outcome, "connected")[-1] == 0.0
    assert metric(outcome, "kept")[-1] == BATCH
    assert shared_memory_of(config) == []
    assert not run_file(trinity_run.environment, config).exists()


def test_down_ends_everything(trinity_run: TrinityRun, config) -> None:
    up(trinity_run, config)
    pids = [sidecar_pid(config), supervisor_pid(config)]
    again = command(trinity_run, "up", str(config))
    assert again.returncode == 2
    assert "already" in again.stderr
    answer = command(trinity_run, "down", str(config))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert not any(alive(pid) for pid in pids)
    assert shared_memory_of(config) == []
    assert Status.load(run_folder(config)).state is State.STOPPED

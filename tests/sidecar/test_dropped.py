"""What operators dropped is counted once, over all lives of the sidecar and whoever leaves meanwhile."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from real_sidecar import token_rows

from mps_trainer.launcher.prometheus import RunCollector
from mps_trainer.run import RunRecord, Status, run_paths
from mps_trainer.sidecar.dropped import Dropped
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub, leftovers
from mps_trainer.transport.sweep import reclaim_orphans, remove_run

COLUMNS = wire_columns(load_task("preference_classifier", {"max_tokens": 64}))


@pytest.fixture
def run_id() -> Iterator[str]:
    found = secrets.token_hex(4)
    yield found
    remove_run(found)
    assert leftovers(found) == []


def operator(run_id: str) -> OperatorChannel:
    return OperatorChannel.create(
        run_id, COLUMNS, RingSettings(num_slots=2, slot_bytes=2**16), backpressure="drop_newest"
    )


def send(channel: OperatorChannel, times: int) -> None:
    for request in range(times):
        channel.send(token_rows(np.random.default_rng(request), 10), request_id=request, want_scores=False)


def drain(hub: SidecarHub) -> None:
    while (delivery := hub.receive()) is not None:
        delivery.release()


def test_what_an_operator_dropped_that_closes_without_a_sidecar_is_counted_by_the_next(run_id: str) -> None:
    with operator(run_id) as channel:
        hub = SidecarHub(run_id, COLUMNS)
        send(channel, 5)
        drain(hub)
        # Killed before it could count: nothing of its status reaches the successor.
        hub.close(unlink=False)
    assert reclaim_orphans(run_id) == 0, "the next operator removes nothing that still has to be counted"
    status = Status(run_id=run_id)
    with SidecarHub(run_id, COLUMNS) as successor:
        dropped = Dropped(successor, status)
        assert dropped.reap()
        assert dropped.counts() == {"oldest": 0, "newest": 30}
        assert not dropped.reap()
        assert leftovers(run_id) == [f"sem.mpst.{run_id}.bell"]
        successor.close(unlink=True)


def test_a_successor_goes_on_counting_where_its_predecessor_was(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter of Prometheus too, which never falls and so would stand still below its highest."""
    monkeypatch.setenv("MPS_TRAINER_STATE_DIR", str(tmp_path / "state"))
    record = RunRecord(
        run_id=run_id, config="", derived_config="", run_dir=str(tmp_path), ray_namespace="", settings={}
    )
    collector = RunCollector(record, run_paths(run_id))

    def told(dropped: Dropped, status: Status) -> float:
        counts = dropped.counts()
        status.lost_oldest, status.lost_newest = counts["oldest"], counts["newest"]
        status.save(tmp_path)
        lost = next(metric for metric in collector.collect() if metric.name == "mps_trainer_experiences_lost")
        return next(sample.value for sample in lost.samples if sample.labels["policy"] == "newest")

    stays = operator(run_id)
    send(stays, 3)
    hub, status = SidecarHub(run_id, COLUMNS), Status(run_id=run_id)
    dropped = Dropped(hub, status)
    with operator(run_id) as leaves:
        hub.find_new()
        send(leaves, 6)
        drain(hub)
    assert told(dropped, status) == 50
    assert dropped.reap()
    assert told(dropped, status) == 50
    hub.close(unlink=False)
    successor, status = SidecarHub(run_id, COLUMNS), Status.load(tmp_path)
    dropped = Dropped(successor, status)
    assert told(dropped, status) == 50
    send(stays, 3)
    assert told(dropped, status) == 60
    stays.close()
    drain(successor)
    assert dropped.reap()
    assert told(dropped, status) == 60
    successor.close(unlink=True)


def test_a_channel_that_somebody_removes_is_still_counted(run_id: str) -> None:
    status = Status(run_id=run_id)
    with SidecarHub(run_id, COLUMNS) as hub, operator(run_id) as channel:
        hub.find_new()
        dropped = Dropped(hub, status)
        send(channel, 4)
        assert dropped.counts()["newest"] == 20
        # As after its file was removed and its name used again.
        hub._channels.popitem()[1].close(remove=False)
        assert dropped.counts()["newest"] == 20
        channel.close()

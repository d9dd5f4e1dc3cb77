"""Copies out of registered rings, with a mocked driver; scripts/gpu_intake.py shows the same on a real one."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mocked_cuda import MockedCuda, is_mapped
from plain_loop import assert_same_weights, newest_weights, train_plainly
from real_sidecar import SMALL_TASK, token_rows

from mps_trainer.errors import TaskError
from mps_trainer.run.exit_codes import OK
from mps_trainer.sidecar.gpu.ring_memory import RingMemory
from mps_trainer.sidecar.gpu.staging import MAX_BYTES, StagingBuffer, staging_for
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.worst_case import worst_case_batch
from mps_trainer.tasks import Ragged, TaskBatch, load_task, wire_columns
from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub, decode_batch, encode_batch, leftovers

TASK = load_task("preference_classifier", SMALL_TASK["task_args"])
COLUMNS = wire_columns(TASK)
RING = RingSettings(num_slots=4, slot_bytes=2**18)
CPU = torch.device("cpu")
CHANGED = (sys.executable, str(Path(__file__).parent / "changed.py"))
DYING_OPERATOR = """
import signal, sys
import numpy as np
sys.path[:0] = sys.argv[2:]
from real_sidecar import token_rows
from mps_trainer.transport import OperatorChannel
from test_ring_memory import COLUMNS, RING
channel = OperatorChannel.create(sys.argv[1], COLUMNS, RING)
channel.send(token_rows(np.random.default_rng(0), 20), request_id=1, want_scores=False)
print("sent", flush=True)
signal.pause()
"""


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"t{os.getpid()}-{secrets.token_hex(3)}"
    yield name
    assert leftovers(name) == []


@contextlib.contextmanager
def attached(run_id: str, ring: RingMemory, operators: int = 1) -> Iterator[tuple[SidecarHub, list[OperatorChannel]]]:
    channels = [OperatorChannel.create(run_id, COLUMNS, RING) for _ in range(operators)]
    hub = SidecarHub(run_id, COLUMNS, on_attach=ring.attach)
    try:
        yield hub, channels
    finally:
        for channel in channels:
            channel.close()
        hub.close(unlink=True)


def send(channel: OperatorChannel, request_id: int = 1, size: int = 20) -> dict[str, Any]:
    rows = token_rows(np.random.default_rng(request_id), size)
    assert channel.send(rows, request_id=request_id, want_scores=False).rows_sent == size
    return rows


def take(hub: SidecarHub, ring: RingMemory) -> Any:
    assert hub.wait(90)
    delivery = hub.receive()
    assert delivery is not None
    delivery.hold_until(ring.wait)
    return delivery


def assert_same(found: TaskBatch, wanted: TaskBatch) -> None:
    assert found.texts == wanted.texts
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        other = found.tensors[name]
        if isinstance(tensor, Ragged):
            assert isinstance(other, Ragged)
            torch.testing.assert_close(other.values, tensor.values, rtol=0, atol=0)
            torch.testing.assert_close(other.offsets, tensor.offsets, rtol=0, atol=0)
        else:
            torch.testing.assert_close(other, tensor, rtol=0, atol=0)


def test_each_mapping_is_registered_once_in_whole_pages_with_a_mocked_driver(run_id: str) -> None:
    cuda = MockedCuda()
    ring = RingMemory(CPU, cuda)
    assert ring.registered is None
    with attached(run_id, ring, operators=2) as (hub, _):
        for _ in range(3):
            hub.find_new()
        segments = hub.segments()
        assert sorted(cuda.addresses("register")) == sorted(segment.address for segment in segments)
        for segment in segments:
            size = cuda.sizes[segment.address]
            assert segment.address % mmap.PAGESIZE == 0
            assert size % mmap.PAGESIZE == 0
            assert segment.nbytes <= size < segment.nbytes + mmap.PAGESIZE
        assert ring.registered is True
    # The mock fails a register of what is registered, and an unregister of what is unmapped.
    assert sorted(cuda.addresses("unregister")) == sorted(cuda.addresses("register"))
    assert cuda.sizes == {}


def test_a_killed_operators_mapping_is_unregistered_before_it_is_unmapped_with_a_mocked_driver(run_id: str) -> None:
    cuda = MockedCuda()
    ring = RingMemory(CPU, cuda)
    here = Path(__file__).parent
    operator = subprocess.Popen(
        [sys.executable, "-c", DYING_OPERATOR, run_id, str(here), str(here.parent / "support")], stdout=subprocess.PIPE
    )
    assert operator.stdout is not None
    with operator.stdout:
        try:
            assert operator.stdout.readline() == b"sent\n"
            hub = SidecarHub(run_id, COLUMNS, on_attach=ring.attach)
            address = hub.segments()[0].address
        finally:
            operator.send_signal(signal.SIGKILL)
            operator.wait(90)
    assert hub.reap() == 0  # its record is still there
    delivery = take(hub, ring)
    assert ring.batch(delivery.batch).size == 20
    delivery.release()
    ring.batch(worst_case_batch(COLUMNS, 2))  # copies that nobody has waited for
    assert hub.reap() == 1
    assert cuda.calls[-2:] == ["synchronize", ("unregister", address)]
    hub.close(unlink=True)
    del delivery
    assert not is_mapped(address)


def test_a_successor_cannot_attach_while_the_mapping_is_unregistered_with_a_mocked_driver(run_id: str) -> None:
    cuda = MockedCuda()
    seen = []
    with attached(run_id, RingMemory(CPU, cuda)) as (hub, channels):
        cuda.on_synchronize = lambda: seen.append(channels[0].sidecar_alive())
        send(channels[0])
        hub.close(unlink=False)
        assert seen == [True]
        successor = SidecarHub(run_id, COLUMNS)
        found = successor.receive()
        assert found is not None
        found.release()
        successor.close(unlink=True)


def test_a_refusal_is_one_line_and_the_same_result_with_a_mocked_driver(
    run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = MockedCuda(status=2)
    ring = RingMemory(CPU, cuda)
    with caplog.at_level(logging.WARNING), attached(run_id, ring, operators=2) as (hub, channels):
        rows = send(channels[0])
        delivery = take(hub, ring)
        batch = ring.batch(delivery.batch)
        delivery.release()
        hub.find_new()
    assert ring.registered is False
    assert len(cuda.addresses("register")) == 2
    assert cuda.addresses("unregister") == []
    assert len(caplog.messages) == 1
    assert "CUDA error 2" in caplog.messages[0]
    assert "ulimit -l" in caplog.messages[0]
    assert "memlock" in caplog.messages[0]
    assert_same(batch, TaskBatch.from_packed(decode_batch(encode_batch(rows, COLUMNS), COLUMNS)))


def test_only_copies_out_of_registered_memory_are_not_waited_for_with_a_mocked_driver(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    copy = torch.Tensor.copy_

    def noted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        asked.append(non_blocking)
        return copy(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    ring = RingMemory(CPU, MockedCuda())
    with attached(run_id, ring) as (hub, channels):
        rows = send(channels[0])
        delivery = take(hub, ring)
        batch = ring.batch(delivery.batch)
        assert asked
        assert all(asked)
        del asked[:]
        plain = ring.batch(decode_batch(encode_batch(rows, COLUMNS), COLUMNS))
        assert asked
        assert not any(asked)
        delivery.release()
    assert_same(batch, plain)


def test_a_slot_is_released_after_the_event_of_its_copies_with_a_mocked_driver(run_id: str) -> None:
    cuda = MockedCuda()
    ring = RingMemory(CPU, cuda)
    with attached(run_id, ring) as (hub, channels):
        send(channels[0])
        delivery = take(hub, ring)
        ring.batch(delivery.batch)
        backlogs = []
        cuda.on_synchronize = lambda: backlogs.append(channels[0].backlog())
        delivery.release()
        delivery.release()
        assert backlogs == [1]
        assert channels[0].backlog() == 0


def test_a_slot_whose_event_cannot_be_waited_for_is_kept_with_a_mocked_driver(run_id: str) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    cuda = MockedCuda()
    ring = RingMemory(CPU, cuda)
    with attached(run_id, ring) as (hub, channels):
        send(channels[0])
        delivery = take(hub, ring)
        ring.batch(delivery.batch)
        cuda.on_synchronize = broken
        for _ in range(2):
            with pytest.raises(RuntimeError, match="unspecified"):
                delivery.release()
            assert channels[0].backlog() == 1
        cuda.on_synchronize = lambda: None
        delivery.release()
        assert channels[0].backlog() == 0


@pytest.mark.parametrize("where", ["copy", "score"])
def test_the_release_waits_also_when_scoring_raises_with_a_mocked_driver(
    run_id: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    cuda = MockedCuda()
    ring = RingMemory(CPU, cuda)
    trainer = Trainer(TASK, 16, 0, to_batch=ring.batch)
    with attached(run_id, ring) as (hub, channels):
        send(channels[0])
        delivery = take(hub, ring)
        backlogs = []
        cuda.on_synchronize = lambda: backlogs.append(channels[0].backlog())
        copies = 0
        to_device = ring.to_device

        def out_of_memory(array: Any) -> torch.Tensor:
            nonlocal copies
            copies += 1
            if copies == 3:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return to_device(array)

        def wrong(model: Any, batch: TaskBatch) -> torch.Tensor:
            raise ValueError("wrong")

        monkeypatch.setattr(ring, "to_device", out_of_memory if where == "copy" else to_device)
        monkeypatch.setattr(TASK, "score", wrong if where == "score" else TASK.score)
        with pytest.raises(TaskError), delivery:
            trainer.score(delivery.batch)
        assert backlogs == [1]
        assert cuda.calls.index("record") < cuda.calls.index("synchronize")


def test_training_draws_into_page_locked_memory_with_a_mocked_driver() -> None:
    cuda = MockedCuda()
    ring = RingMemory(CPU, cuda)
    staging = staging_for(ring, COLUMNS, 16)
    assert isinstance(staging, StagingBuffer)
    assert len(cuda.addresses("register")) == 1
    assert ring.registered is None  # of rings only
    ((begin, size),) = cuda.sizes.items()
    worst = worst_case_batch(COLUMNS, 16)
    plain, staged = (ReplayBuffer(COLUMNS, 16, 0) for _ in range(2))
    for replay in (plain, staged):
        replay.add(worst)
    places = []
    for _ in range(3):
        wanted, drawn = plain.sample(16), staged.sample(16, staging.start())
        for column in drawn.columns.values():
            for array in (column.values, *([] if column.offsets is None else [column.offsets])):
                at = array.__array_interface__["data"][0]
                assert begin <= at
                assert at + array.nbytes <= begin + size
                assert at % 64 == 0
                places.append(at)
        assert_same(ring.batch(drawn), TaskBatch.from_packed(wanted))
    # Never more memory than for one batch, and never written again before it has left.
    assert len(set(places)) == len(places) / 3
    assert cuda.calls.count("synchronize") == 3
    ring.close()
    assert cuda.addresses("unregister") == [begin]


def test_no_staging_beyond_the_limit_or_where_it_is_refused_with_a_mocked_driver() -> None:
    cuda = MockedCuda()
    ring = RingMemory(CPU, cuda)
    assert staging_for(ring, COLUMNS, MAX_BYTES // 64) is None
    assert cuda.calls == []
    cuda.status = 1
    assert staging_for(ring, COLUMNS, 16) is None


@pytest.mark.parametrize("status", [0, 2])
def test_a_whole_run_is_the_same_whether_registered_or_refused_with_a_mocked_driver(make_run: Any, status: int) -> None:
    run = make_run(batch_size=64, steps_per_batch=3, replay_capacity=300, seed=7)
    rng = np.random.default_rng(0)
    batches = [token_rows(rng, 100, first=100 * i) for i in range(3)]
    child, ready = run.start(*CHANGED, "mocked-driver", str(status))
    assert ready == {"state": "ready"}
    with run.channel() as channel:
        run.wait_for_attach(channel)
        for request, rows in enumerate(batches):
            channel.send(rows, request_id=request, want_scores=True)
            assert channel.receive_scores(request, timeout_s=90) is not None
        deadline = time.monotonic() + 90
        while run.status().ring_registered is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) == OK
    assert_same_weights(newest_weights(run.run_dir), train_plainly(run.settings, batches))
    assert run.status().ring_registered is (status == 0)
    told = [line.split(": ")[1].split()[0] for line in run.log().splitlines() if line.startswith("mocked driver")]
    # The staging buffer, then the ring; the ring's goes first, with its mapping.
    assert told == (["register", "register", "unregister", "unregister"] if status == 0 else ["register", "register"])
    assert run.log().count("ulimit -l") == (0 if status == 0 else 1)

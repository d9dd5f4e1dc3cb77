from __future__ import annotations

from typing import Any

import pytest

from mps_trainer.columns import IDENTITY_COLUMNS, Column
from mps_trainer.config import load_settings
from mps_trainer.errors import ConfigError
from mps_trainer.run import State
from mps_trainer.run.exit_codes import BAD_CONFIG
from mps_trainer.run.host_memory import read_memory
from mps_trainer.sidecar.replay_memory import batch_row_bytes, check_replay_memory, row_bytes

COLUMNS = (*IDENTITY_COLUMNS, Column(name="v", source="info.v", shape=(25_000,)))


def test_a_buffer_that_cannot_fit_is_refused_with_a_capacity_that_does() -> None:
    assert row_bytes(COLUMNS) > 100_000
    with pytest.raises(ConfigError, match=r"replay_capacity 50000 .* this machine has 1000 MiB") as caught:
        check_replay_memory(COLUMNS, load_settings({"replay_capacity": 50_000}), "cpu", 1000 * 2**20)
    fitting = int(caught.value.todo.removeprefix("lower replay_capacity to ").split()[0])
    assert 1000 < fitting < 10_000
    check_replay_memory(COLUMNS, load_settings({"replay_capacity": fitting}), "cpu", 1000 * 2**20)


def test_a_batch_that_cannot_fit_is_refused_with_a_size_that_does() -> None:
    assert 200_000 < batch_row_bytes(COLUMNS) < 210_000
    settings = {"batch_size": 50_000, "replay_capacity": 100}
    with pytest.raises(ConfigError, match=r"batch_size 50000 .* this machine has 1000 MiB") as caught:
        check_replay_memory(COLUMNS, load_settings(settings), "cpu", 1000 * 2**20)
    fitting = int(caught.value.todo.removeprefix("lower batch_size to ").split()[0])
    assert 1000 < fitting < 10_000
    check_replay_memory(COLUMNS, load_settings({**settings, "batch_size": fitting}), "cpu", 1000 * 2**20)


def test_a_batch_with_more_elements_than_its_offsets_count_is_refused() -> None:
    columns = (*IDENTITY_COLUMNS, Column(name="t", source="info.t", dtype="uint8", shape=(None,), maximum=2**20))
    with pytest.raises(ConfigError, match=r"batch_size 2048 .* 2147483647 elements") as caught:
        check_replay_memory(columns, load_settings({"batch_size": 2048, "replay_capacity": 100}), "cpu", 2**45)
    assert caught.value.todo == "lower batch_size to 2047 or less"
    check_replay_memory(columns, load_settings({"batch_size": 2047, "replay_capacity": 100}), "cpu", 2**45)


def test_the_sidecar_refuses_a_batch_before_it_is_made(make_run: Any) -> None:
    run = make_run(batch_size=2**24, replay_capacity=100, task_args={"max_tokens": 65_536})
    child, answer = run.start()
    assert child.wait(90) == BAD_CONFIG
    assert "batch_size 16777216 experiences" in answer["error"]
    assert run.status().state is State.FAILED


def test_more_than_memory_is_a_warning_on_the_cpu_and_nothing_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings({"replay_capacity": 10_000, "memory": "256MiB"})
    check_replay_memory(COLUMNS, settings, "cuda:0", 2**40)
    assert caplog.text == ""
    check_replay_memory(COLUMNS, settings, "cpu", 2**40)
    assert "wishes for 256 MiB" in caplog.text


def test_the_sidecar_refuses_it_before_ready(make_run: Any) -> None:
    capacity = 4 * read_memory()[1] // 600
    run = make_run(replay_capacity=capacity)
    child, answer = run.start()
    assert child.wait(90) == BAD_CONFIG
    assert f"replay_capacity {capacity}" in answer["error"]
    assert "lower replay_capacity to" in answer["todo"]
    assert run.status().state is State.FAILED

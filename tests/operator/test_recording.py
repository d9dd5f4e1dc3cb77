"""Recordings: what is written of Trinity's experiences, what comes back, and how little can go wrong."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trinity.common.experience import EID, Experience

from mps_trainer.columns import IDENTITY_COLUMNS, Column
from mps_trainer.errors import ConfigError, ExperienceError
from mps_trainer.operator import AuxTrainer
from mps_trainer.operator.extract import Extractor
from mps_trainer.operator.recording import RecordedId, Recorder, read_recording

COLUMNS = (
    *IDENTITY_COLUMNS,
    Column(name="response", source="response_tokens", dtype="int32", shape=(None,), maximum=100),
    Column(name="logprobs", source="logprobs", shape=(None,), maximum=100),
    Column(name="hidden", source="info.hidden", shape=(3,)),
    Column(name="mask", source="action_mask", dtype="bool", shape=(None,), maximum=100),
    Column(name="text", source="response_text", dtype="text", maximum=100, required=False),
    Column(name="accuracy", source="metrics.accuracy"),
    Column(name="group_mean", source="group.reward_mean"),
    Column(name="batch_mean", source="batch.reward_mean"),
)


def experiences(batch: int = 1, size: int = 8) -> list[Experience]:
    generator = torch.Generator().manual_seed(batch)
    return [
        Experience(
            eid=EID(batch=batch, task=i // 4, run=i % 4),
            tokens=torch.randint(0, 200_000, (10,), generator=generator, dtype=torch.int32),
            prompt_length=4,
            logprobs=-torch.rand(6, generator=generator),
            reward=None if i == 3 else float(i % 2),
            info={"hidden": torch.randn(3, generator=generator, dtype=torch.float32).bfloat16(), "words": ["é", "b"]},
            metrics={"accuracy": np.float32(0.25)},
            response_text="語 [bold]" if i else None,
        )
        for i in range(size)
    ]


def as_lists(rows: Any) -> dict[str, Any]:
    return {name: [np.asarray(row).tolist() for row in values] for name, values in rows.items()}


def test_what_a_task_reads_of_a_recording_is_what_it_reads_of_the_experiences(tmp_path: Path) -> None:
    batches = [experiences(batch) for batch in (1, 2)]
    recorder = Recorder(tmp_path / "new" / "e.jsonl", most=100)
    metrics = [recorder.add(batch) for batch in batches]
    recorder.close()
    assert [m["recorded"] for m in metrics] == [8, 16]
    assert (metrics[1]["record_errors_total"], metrics[1]["record_left_out_total"]) == (0, 0)
    assert (tmp_path / "new" / "e.jsonl").stat().st_mode & 0o777 == 0o600
    found = read_recording(tmp_path / "new" / "e.jsonl")
    assert (found.size, found.broken, [len(batch) for batch in found.batches]) == (16, 0, [8, 8])
    for original, again in zip(batches, found.batches, strict=True):
        expected, got = Extractor(COLUMNS)(original), Extractor(COLUMNS)(again)
        assert (got.fed, got.problems) == (expected.fed, expected.problems)
        assert len(got.fed) == 7, "the one without a reward has no group mean"
        assert as_lists(got.rows) == as_lists(expected.rows)
    assert again[0].info["words"] == ["é", "b"]


def test_the_names_are_those_of_trinity() -> None:
    theirs = EID(batch="b", task=2, run=3, step=4, suffix="abc")
    ours = RecordedId(**theirs.to_dict())
    assert [getattr(ours, key) for key in ("uid", "sid", "rid", "tid")] == [
        getattr(theirs, key) for key in ("uid", "sid", "rid", "tid")
    ]


def test_what_json_cannot_hold_costs_itself_only(tmp_path: Path) -> None:
    [odd] = experiences(size=1)
    odd.info |= {"object": object(), "nan": float("nan"), ("a", "tuple"): 1}
    metrics = Recorder(tmp_path / "e.jsonl", most=10).add([odd])
    assert (metrics["recorded"], metrics["record_left_out_total"], metrics["record_errors_total"]) == (1, 1, 0)
    [[found]] = read_recording(tmp_path / "e.jsonl").batches
    assert sorted(found.info) == ["('a', 'tuple')", "hidden", "nan", "words"]
    assert np.isnan(found.info["nan"])


def test_it_ends_at_its_limit_and_goes_on_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    first = Recorder(path, most=100)
    first.add(experiences())
    first.close()
    os.truncate(path, path.stat().st_size - 10)  # as a kill in the middle of a write leaves it
    second = Recorder(path, most=10)
    assert second.add(experiences(2))["recorded"] == 10
    assert second.add(experiences(3))["recorded"] == 10
    found = read_recording(path)
    assert (found.size, found.broken) == (10, 1)


@pytest.mark.parametrize("content", [None, "", "{}\n[1]\nnonsense\n"])
def test_a_file_without_experiences_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "e.jsonl").write_text(content)
    with pytest.raises(ExperienceError, match=r"e\.jsonl") as error:
        read_recording(tmp_path / "e.jsonl")
    assert "mps-trainer record" in error.value.todo


def drive(aux: AuxTrainer, batches: list[list[Experience]]) -> list[tuple[list[Experience], dict[str, Any]]]:
    async def main() -> list[Any]:
        await aux.prepare()
        try:
            return [await aux.process(batch) for batch in batches]
        finally:
            await aux.close()

    return asyncio.run(main())


def test_record_only_needs_no_run_and_no_task_and_leaves_the_event_loop_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    add = Recorder.add
    monkeypatch.setattr(Recorder, "add", lambda *args: threads.append(threading.current_thread().name) or add(*args))
    batch = experiences()
    before = Experience.serialize_many(batch)
    aux = AuxTrainer(task="no.such:Task", record=str(tmp_path / "e.jsonl"), record_only=True, on_error="raise")
    [(kept, metrics)] = drive(aux, [batch])
    assert kept is batch
    assert Experience.serialize_many(batch) == before
    assert (metrics["aux_trainer/recorded"], metrics["aux_trainer/enabled"]) == (8, 0)
    assert all(type(value) in (int, float) for value in metrics.values())
    assert [name.partition("_0")[0] for name in threads] == ["aux_trainer"]
    assert read_recording(tmp_path / "e.jsonl").size == 8


def test_a_file_that_cannot_be_written_is_counted_and_loses_no_batch(tmp_path: Path) -> None:
    batch = experiences()
    aux = AuxTrainer(record=str(tmp_path), record_only=True, on_error="raise")
    results = drive(aux, [batch, batch])
    assert [kept for kept, _ in results] == [batch, batch]
    assert results[1][1]["aux_trainer/record_errors_total"] == 2


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="write an absolute path"):
        AuxTrainer(record="e.jsonl")


def test_disabled_records_nothing(tmp_path: Path) -> None:
    drive(AuxTrainer(enabled=False, record=str(tmp_path / "e.jsonl")), [experiences()])
    assert list(tmp_path.iterdir()) == []


def test_a_run_records_rewards_as_they_came(make_run: Any, tmp_path: Path) -> None:
    run = make_run(min_experiences=8)
    run.start()
    batch = [e for e in experiences(size=32) if e.reward is not None]
    raw = [e.reward for e in batch]
    aux = AuxTrainer(
        task_args=run.settings.task_args,
        run_file=str(run.paths.run_file),
        use="reward",
        reward={"how": "replace", "weight": -3},
        min_version=0,
        record=str(tmp_path / "e.jsonl"),
    )
    [(_, metrics)] = drive(aux, [batch])
    assert metrics["aux_trainer/recorded"] == 31
    assert [e.reward for e in batch] != raw
    assert [e.reward for e in read_recording(tmp_path / "e.jsonl").batches[0]] == raw


@pytest.mark.parametrize("kind", ["fifo", "/dev/full", "/dev/zero"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = Path(kind)
    if kind == "fifo":
        path = tmp_path / "e.jsonl"
        os.mkfifo(path)
    metrics = Recorder(path, most=10).add(experiences(size=2))
    assert metrics["record_errors_total"] == 1
    assert metrics["recorded"] == 0

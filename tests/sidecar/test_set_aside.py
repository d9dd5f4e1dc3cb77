"""What is condemned leaves training, is kept and counted once, whatever happens in between."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from poison_tasks import ASSERT
from real_sidecar import token_rows

from mps_trainer.columns import PackedBatch, PackedColumn
from mps_trainer.config import load_settings
from mps_trainer.errors import GpuFaultError, TaskError
from mps_trainer.run.doing import Stage, Subject
from mps_trainer.run.private_files import write_private
from mps_trainer.run.verdicts import Verdict, load_verdicts, save_verdicts
from mps_trainer.sidecar import set_aside
from mps_trainer.sidecar.gpu.faults import is_gpu_fault
from mps_trainer.sidecar.learner import Learner, RecordName
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.set_aside import SetAside, reference
from mps_trainer.sidecar.trainer import Trainer
from mps_trainer.sidecar.worst_case import worst_case_batch
from mps_trainer.tasks import load_task, wire_columns

TASK = ("preference_classifier", {"max_tokens": 64, "num_buckets": 64, "hidden_size": 32})
NAME = RecordName("/mpst.x.0", 7, 3, 0, 1, 99)


def packed(size: int, first: int = 0) -> PackedBatch:
    rows, found = token_rows(np.random.default_rng(first), size, first), {}
    for column in wire_columns(load_task(*TASK)):
        if column.kind in ("text", "ragged"):
            is_text = column.kind == "text"
            parts = [np.frombuffer(row.encode(), np.uint8) if is_text else row for row in rows[column.name]]
            offsets = np.cumsum([0, *map(len, parts)]).astype(np.int32)
            found[column.name] = PackedColumn(np.concatenate(parts), offsets, is_text)
        else:
            found[column.name] = PackedColumn(np.asarray(rows[column.name], column.dtype))
    return PackedBatch(found, size)


def make_learner(min_experiences: int = 1) -> Learner:
    settings = load_settings({"batch_size": 8, "steps_per_batch": 2, "min_experiences": min_experiences})
    task = load_task(*TASK)
    return Learner(Trainer(task, 8, 0), ReplayBuffer(wire_columns(task), 100, 0), settings)


def condemn(run_dir: Path, subject: Subject, stage: Stage = Stage.TRAINING) -> None:
    save_verdicts(run_dir, [*load_verdicts(run_dir), Verdict(stage, subject, 1, "signal SIGABRT", True)])


def test_a_condemned_record_is_kept_with_all_its_columns_and_counted_once(tmp_path: Path) -> None:
    batch = packed(5)
    condemn(tmp_path, Subject(4, reference(NAME), ("e0",)), Stage.SCORING)
    for _ in range(2):
        aside = SetAside(tmp_path)
        assert aside.takes(NAME, batch)
        assert aside.takes(NAME, batch)
        assert aside.count == 5
        assert not aside.takes(RecordName("/mpst.x.0", 8, 3, 0, 1, 99), batch)
    [told] = (tmp_path / "set_aside").glob("*.json")
    assert (tmp_path / "set_aside").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "set_aside").iterdir()} == {0o600}
    facts = json.loads(told.read_text())
    assert (facts["stage"], facts["record"]["request_id"], facts["cause"]) == ("scoring", 3, "signal SIGABRT")
    with pa.OSFile(str(told.with_suffix(".arrow"))) as file:
        table = pa.ipc.open_file(file).read_all()
    assert set(table.column_names) == set(batch.columns)
    assert table.column("eid").to_pylist() == facts["eids"] == [f"e{i}" for i in range(5)]
    assert table.column("tokens").to_pylist() == [batch["tokens"].row(i).tolist() for i in range(5)]


def test_a_death_amid_the_writing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    condemn(tmp_path, Subject(4, reference(NAME), ("e0",)), Stage.SCORING)

    def die(path: Path, content: bytes) -> None:
        if path.suffix == ".json":
            raise SystemExit("killed")
        write_private(path, content)

    monkeypatch.setattr(set_aside, "write_private", die)
    with pytest.raises(SystemExit, match="killed"):
        SetAside(tmp_path).takes(NAME, packed(5))
    monkeypatch.undo()
    again = SetAside(tmp_path)
    assert again.count == 0
    assert again.takes(NAME, packed(5))
    assert again.count == 5


def test_a_disk_that_refuses_the_copy_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    condemn(tmp_path, Subject(4, reference(NAME), ("e0",)), Stage.SCORING)
    (tmp_path / "set_aside").touch()
    aside = SetAside(tmp_path)
    assert aside.takes(NAME, packed(5))
    assert aside.count == 5
    assert "no copy of record-mpst.x.0-7-99 can be kept" in caplog.text


def test_a_condemned_steps_experiences_leave_the_buffer_before_that_step_in_every_life(tmp_path: Path) -> None:
    condemn(tmp_path, Subject(2, None, ("e3", "e9", "gone")))
    weights = []
    for _ in range(2):
        learner, aside = make_learner(), SetAside(tmp_path)
        steps: list[list[str]] = []
        learner.on_step = lambda b, steps=steps: steps.append([b["eid"].text(i) for i in range(b.num_rows)])
        for number in range(2):
            learner.take(RecordName("/c", number, number, 0, 1, number), packed(10, 10 * number))
            while learner.steps_due:
                aside.before_step(learner)
                learner.train_step()
        assert len(learner.replay) == 18
        assert not {"e3", "e9"} & {eid for step in steps[2:] for eid in step}
        # They are known, so a second delivery does not bring them back.
        learner.take(RecordName("/c", 9, 9, 0, 1, 9), packed(10))
        assert len(learner.replay) == 18
        weights.append(torch.cat([p.detach().flatten() for p in learner.trainer.model.parameters()]))
        assert aside.count == 2
    assert torch.equal(*weights)
    assert len(list((tmp_path / "set_aside").glob("*.json"))) == 1


def test_a_step_without_enough_experiences_left_is_not_taken(tmp_path: Path) -> None:
    condemn(tmp_path, Subject(0, None, tuple(f"e{i}" for i in range(10))))
    learner, aside = make_learner(min_experiences=4), SetAside(tmp_path)
    learner.take(NAME, packed(10))
    assert learner.steps_due == 2
    aside.before_step(learner)
    assert (learner.steps_due, len(learner.replay), aside.count) == (0, 0, 10)


def test_what_is_not_condemned_changes_nothing(tmp_path: Path) -> None:
    save_verdicts(tmp_path, [Verdict(Stage.TRAINING, Subject(2, None, ("e3",)), 1, "signal SIGKILL", False)])
    condemn(tmp_path, Subject(1, None, ("elsewhere",)))
    learner, aside = make_learner(), SetAside(tmp_path)
    learner.trainer.step = 2
    learner.take(NAME, packed(10))
    due = learner.steps_due
    aside.before_step(learner)
    assert (len(learner.replay), aside.count, learner.steps_due) == (10, 0, due)


@pytest.mark.parametrize("step", [0, 2, 50])
def test_what_is_banned_is_in_no_step_whatever_its_number_and_whenever_it_comes(tmp_path: Path, step: int) -> None:
    # With a pace a successor's steps have other rows than those of the same number before.
    condemn(tmp_path, Subject(step, None, ("e3", "e15", "e27")))
    for records in ([0, 10], [10, 20, 0], [0, 10, 20]):
        learner, aside = make_learner(), SetAside(tmp_path)
        learner.trainer.step = 5
        steps: list[str] = []
        learner.on_step = lambda b, steps=steps: steps.extend(b["eid"].text(i) for i in range(b.num_rows))
        for first in records:
            learner.take(RecordName("/c", first, first, 0, 1, first), packed(10, first))
            while learner.steps_due:
                aside.before_step(learner)
                learner.train_step()
        assert steps
        assert not {"e3", "e15", "e27"} & set(steps)
        assert len(learner.replay) == 9 * len(records)
    # Kept and counted once each over three lives, though they came in other company each time.
    assert aside.count == SetAside(tmp_path).count == 3
    [told] = (tmp_path / "set_aside").glob("*.json")
    facts = json.loads(told.read_text())
    assert (facts["experiences"], sorted(facts["eids"])) == (3, ["e15", "e27", "e3"])
    with pa.OSFile(str(told.with_suffix(".arrow"))) as file:
        assert pa.ipc.open_file(file).read_all().column("eid").to_pylist() == facts["eids"]


def test_what_is_banned_does_not_come_in_at_all(tmp_path: Path) -> None:
    condemn(tmp_path, Subject(3, None, ("e103", "e101", "e12")))
    condemn(tmp_path, Subject(4, None, ("e102",)))
    for life in range(2):
        learner, aside = make_learner(), SetAside(tmp_path)
        aside.guard(learner.replay)
        learner.take(NAME, packed(100))
        # The buffer is full: what does not come in pushes nobody out.
        assert learner.take(RecordName("/c", 9, 9, 0, 1, 9), packed(4, 100)) == 4
        assert len(learner.replay) == 100
        assert learner.replay.held([b"e0", b"e1", b"e12", b"e100", b"e101", b"e102", b"e103"]) == [
            b"e0",
            b"e1",
            b"e100",
        ]
        assert (learner.counters.duplicates, aside.count) == (0, 4), f"in life {life}"
        # Delivered again: known.
        assert learner.take(RecordName("/c", 9, 9, 0, 1, 9), packed(4, 100)) == 0
        aside.before_step(learner)
        assert aside.count == 4
    found = {}
    for told in (tmp_path / "set_aside").glob("step-*.arrow"):
        with pa.OSFile(str(told)) as file:
            table = pa.ipc.open_file(file).read_all()
        found |= dict(zip(table.column("eid").to_pylist(), table.column("tokens").to_pylist(), strict=True))
    late, early = packed(4, 100), packed(100)
    assert found == {
        "e12": early["tokens"].row(12).tolist(), **{f"e10{i}": late["tokens"].row(i).tolist() for i in (1, 2, 3)}
    }  # fmt: skip


def test_a_look_for_banned_experiences_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    condemn(tmp_path, Subject(0, None, ("e3",)))
    learner, aside, looks = make_learner(), SetAside(tmp_path), []
    held = learner.replay.held
    monkeypatch.setattr(learner.replay, "held", lambda eids, number: looks.append(number) or held(eids, number))
    learner.take(NAME, packed(10))
    for _ in range(3):
        aside.before_step(learner)
    learner.take(RecordName("/c", 9, 9, 0, 1, 9), packed(10, 10))
    aside.before_step(learner)
    assert looks == [0, 10]
    assert learner.replay.held({b"e12", b"e2"}, 10) == [b"e12"]


def test_removing_rows_keeps_the_order_of_the_others() -> None:
    replay = ReplayBuffer(wire_columns(load_task(*TASK)), 12, 0)
    replay.add(packed(10))
    replay.add(packed(10, 10))  # the ring has wrapped: e8 to e19 are held
    removed = replay.remove([b"e8", b"e13", b"e0"])
    assert [removed["eid"].text(i) for i in range(2)] == ["e8", "e13"]
    rows = replay.state()[0]
    assert rows["eid.values"].tobytes().decode() == "".join(f"e{i}" for i in range(9, 20) if i != 13)
    assert replay.add(packed(10, 20)) == 10
    assert len(replay) == 12


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        (ASSERT, True),
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: invalid argument", False),
        ("device-side assert is what my model is called", False),
        ("the size of tensor a (3) must match", False),
    ],
)
def test_a_dead_context_is_known_by_the_drivers_words(text: str, dead: bool) -> None:
    assert is_gpu_fault(RuntimeError(text)) is dead
    wrapped = KeyError("in the task")
    wrapped.__context__ = RuntimeError(text)
    assert is_gpu_fault(wrapped) is dead


@pytest.mark.parametrize("answers", [True, False])
def test_an_unclear_error_asks_the_device_with_a_mocked_driver(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    def synchronize(device: torch.device) -> None:
        if not answers:
            raise RuntimeError(ASSERT)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm")
    assert is_gpu_fault(error, torch.device("cuda:0")) is not answers
    assert is_gpu_fault(error, torch.device("cpu")) is False


def test_a_fault_of_the_gpu_is_no_fault_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task(*TASK)
    trainer = Trainer(task, 8, 0)
    batch = worst_case_batch(wire_columns(task), 8)
    for error, expected in ((RuntimeError(ASSERT), GpuFaultError), (RuntimeError("a bug"), TaskError)):
        monkeypatch.setattr(task, "loss", lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(expected, match="made-up"):
            trainer.train_step(batch)

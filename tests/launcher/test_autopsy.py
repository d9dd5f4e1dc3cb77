"""Who is to blame for a sidecar's death: the decision alone."""

from __future__ import annotations

import signal
import struct
from pathlib import Path

import pytest

from mps_trainer.launcher.autopsy import Autopsy
from mps_trainer.run import RunRecord, State, Status, exit_codes
from mps_trainer.run.doing import DoingFile, RecordRef, Stage, read_doing
from mps_trainer.run.verdicts import load_verdicts

RECORD = RecordRef("/c", 7, 3, 0, 99)


def die(
    run_dir: Path, stage: Stage = Stage.SCORING, record: RecordRef | None = RECORD, step: int = 4, eids: str = "ab"
) -> None:
    file = DoingFile(run_dir, 8)
    file.begin(step, record, struct.pack(f"{len(eids) + 1}i", *range(len(eids) + 1)), eids.encode())
    file.stage(stage)
    file.close()


@pytest.mark.parametrize(
    ("code", "options", "condemned"),
    [
        (-signal.SIGABRT, {}, True),
        (-signal.SIGSEGV, {}, True),
        (exit_codes.GPU_FAULT, {}, True),
        (7, {}, True),
        (exit_codes.CRASHED, {"hung": True}, True),
        (-signal.SIGKILL, {"hung": True}, True),
        (-signal.SIGKILL, {}, False),
        (-signal.SIGTERM, {}, False),
        (exit_codes.CRASHED, {}, False),
    ],
)
def test_the_first_death(tmp_path: Path, code: int, options: dict[str, bool], condemned: bool) -> None:
    die(tmp_path)
    hung = read_doing(tmp_path) if options else None
    told = Autopsy(tmp_path).judge(code, hung=hung)
    assert "record 7 of request 3 of /c (experiences a, b): set aside" in told
    [verdict] = load_verdicts(tmp_path)
    assert (verdict.condemned, verdict.deaths, verdict.subject.record) == (condemned, 1, RECORD)
    # Nobody is blamed twice for one death.
    assert Autopsy(tmp_path).judge(code) == ""


def test_a_hang_is_blamed_on_what_was_in_work_when_it_was_found(tmp_path: Path) -> None:
    die(tmp_path)
    hung = read_doing(tmp_path)
    die(tmp_path, record=RecordRef("/c", 8, 3, 0, 99))
    Autopsy(tmp_path).judge(-signal.SIGKILL, hung=hung)
    assert [v.subject.record for v in load_verdicts(tmp_path)] == [RECORD]


def test_one_that_went_on_when_it_was_asked_to_end_was_slow_and_nobody_is_blamed(tmp_path: Path) -> None:
    die(tmp_path)
    told = Autopsy(tmp_path).judge(exit_codes.CRASHED, hung=read_doing(tmp_path), only_slow=True)
    assert "record 7" in told
    assert "too slow for hang_timeout, nothing set aside" in told
    assert load_verdicts(tmp_path) == []
    assert read_doing(tmp_path) is None


def test_two_kills_from_outside_over_one_record_are_enough_and_over_two_are_not(tmp_path: Path) -> None:
    for seq in (1, 2, 1):
        die(tmp_path, record=RecordRef("/c", seq, 3, 0, 99))
        Autopsy(tmp_path).judge(-signal.SIGKILL)
    assert [(v.subject.record.seq, v.deaths, v.condemned) for v in load_verdicts(tmp_path)] == [
        (1, 2, True),
        (2, 1, False),
    ]


def test_a_step_is_known_by_its_number_and_its_experiences(tmp_path: Path) -> None:
    for step in (4, 5, 4):
        die(tmp_path, Stage.TRAINING, None, step)
        Autopsy(tmp_path).judge(-signal.SIGKILL)
    assert [(v.subject.step, v.condemned) for v in load_verdicts(tmp_path)] == [(4, True), (5, False)]


def test_where_steps_are_drawn_anew_two_kills_condemn_what_both_steps_had(tmp_path: Path) -> None:
    said = []
    for step, eids in ((4, "abp"), (9, "cd"), (2, "pce"), (4, "fg"), (7, "afx")):
        die(tmp_path, Stage.TRAINING, None, step, eids)
        said.append(Autopsy(tmp_path, steps_recur=False).judge(-signal.SIGKILL))
    # c is an innocent that the second step shared; what is condemned already condemns nothing else.
    assert [(v.subject.step, "".join(v.subject.eids), v.deaths, v.condemned) for v in load_verdicts(tmp_path)] == [
        (2, "pc", 2, True),
        (7, "f", 2, True),
    ]
    assert "training step 2 (experiences p, c): set aside" in said[2]
    assert "if that happens again" in said[3]


def test_where_steps_are_drawn_anew_a_crash_condemns_the_whole_step_at_once(tmp_path: Path) -> None:
    for step, eids in ((4, "abp"), (9, "acd")):
        die(tmp_path, Stage.TRAINING, None, step, eids)
        Autopsy(tmp_path, steps_recur=False).judge(-signal.SIGSEGV)
    assert ["".join(v.subject.eids) for v in load_verdicts(tmp_path) if v.condemned] == ["abp", "acd"]


@pytest.mark.parametrize(
    ("settings", "mps", "recur"),
    [
        ({"pace": "auto"}, "off", True),
        ({"pace": "auto"}, "on", False),
        ({"pace": "off", "schedule": {"train": "steps"}}, "on", True),
        ({"pace": "off", "schedule": {"train": "continuous"}}, "off", False),
    ],
)
def test_steps_recur_without_a_pace_and_but_for_training_all_the_time(
    tmp_path: Path, settings: dict[str, object], mps: str, recur: bool
) -> None:
    record = RunRecord(
        run_id="abcd1234", config="", derived_config="", run_dir=str(tmp_path), ray_namespace="", settings=settings,
        mps=mps,
    )  # fmt: skip
    for step, eids in ((4, "ab"), (5, "bc")):
        die(tmp_path, Stage.TRAINING, None, step, eids)
        Autopsy.of_run(record).judge(-signal.SIGKILL)
    assert [v.condemned for v in load_verdicts(tmp_path)] == ([False, False] if recur else [True])


@pytest.mark.parametrize("stage", [Stage.WAITING, Stage.SAVING])
def test_no_experience_is_blamed_for_what_happens_without_any(tmp_path: Path, stage: Stage) -> None:
    die(tmp_path, stage)
    assert Autopsy(tmp_path).judge(-signal.SIGSEGV) in ("; it was waiting for records", "; it was saving a checkpoint")
    assert load_verdicts(tmp_path) == []


def test_a_gpu_fault_while_nothing_was_in_work_is_nobodys_batch(tmp_path: Path) -> None:
    die(tmp_path, Stage.WAITING)
    assert Autopsy(tmp_path).judge(exit_codes.GPU_FAULT) == "; it was waiting for records"
    assert load_verdicts(tmp_path) == []


def test_the_cause_of_a_gpu_fault_is_in_the_sidecars_own_words(tmp_path: Path) -> None:
    Status(run_id="12345678", state=State.READY, error="loss broke the GPU context").save(tmp_path)
    die(tmp_path)
    Autopsy(tmp_path).judge(exit_codes.GPU_FAULT)
    assert load_verdicts(tmp_path)[0].cause == "loss broke the GPU context"


def test_what_a_sidecar_said_last_is_told_and_what_the_supervisor_said_of_the_death_before_is_not(
    tmp_path: Path,
) -> None:
    status = Status(run_id="12345678", state=State.READY, error="the journal takes 0 bytes\n  What to do: make room")
    status.save(tmp_path)
    assert Autopsy(tmp_path).judge(exit_codes.CRASHED) == " (the journal takes 0 bytes)"
    # The next one ends before it can say anything, when it is imported perhaps.
    status.state, status.error = State.RESTARTING, "it ended with exit code 1 (...); restart 1 of 5"
    status.save(tmp_path)
    assert Autopsy(tmp_path).judge(exit_codes.CRASHED) == ""


def test_a_task_error_and_a_death_without_a_note_decide_nothing(tmp_path: Path) -> None:
    assert Autopsy(tmp_path).judge(-signal.SIGSEGV) == ""
    die(tmp_path)
    assert Autopsy(tmp_path).judge(exit_codes.TASK_FAILED) == ""
    assert load_verdicts(tmp_path) == []


def test_a_full_disk_costs_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    autopsy = Autopsy(tmp_path)
    for seq, full in ((1, True), (2, False)):
        die(tmp_path, record=RecordRef("/c", seq, 3, 0, 99))
        with monkeypatch.context() as patch:
            if full:
                patch.setattr(
                    "mps_trainer.launcher.autopsy.save_verdicts", lambda *_: Path("/dev/full").write_text("x")
                )
            autopsy.judge(-signal.SIGSEGV)
        assert len(load_verdicts(tmp_path)) == (0 if full else 2)
    assert "record 1 of request 3" in caplog.text
    assert "No space left" in caplog.text


def test_a_damaged_file_of_verdicts_is_none(tmp_path: Path) -> None:
    (tmp_path / "verdicts.json").write_text('[{"stage": 9}]')
    assert load_verdicts(tmp_path) == []

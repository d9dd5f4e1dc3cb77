"""An error in the pace's code is told as one of the pace, and blames no experience."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_gate import IDLE, gate_of
from test_schedule import batch, name

from mps_trainer.launcher.autopsy import Autopsy
from mps_trainer.run import Status
from mps_trainer.run.doing import Stage
from mps_trainer.run.exit_codes import CRASHED
from mps_trainer.run.verdicts import load_verdicts
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.noting import Note
from mps_trainer.sidecar.pace.named import NamedPace
from mps_trainer.sidecar.steps import Steps


def fail(*_: object, **__: object) -> None:
    raise KeyError("a fault of the pace")


def take(learner: Learner, note: Note) -> None:
    """As the loop takes a record."""
    note.record(Stage.TAKING, name(0), batch(20), 0)
    learner.take(name(0), batch(20))


def step(pace: NamedPace, learner: Learner, note: Note) -> None:
    aside, report = SimpleNamespace(before_step=lambda _: None), SimpleNamespace(stepped=lambda *_: None)
    learner.on_step = lambda rows: note.step(rows, 0)
    Steps(learner, aside, report, pace=pace).take_due(lambda: False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("broken", "work"),
    [
        ("_skip_oldest", lambda pace, learner, note: None),
        ("_count_batches", step),
        ("_speak", step),
        ("_notes", lambda pace, learner, note: pace.describe(Status(run_id="r"))),
        ("wait_s", lambda pace, learner, note: pace.wait_s(0.1)),
        ("drain", lambda pace, learner, note: pace.drain(for_good=True)),
    ],
)
def test_what_fails_in_the_pace_is_told_as_the_pace_and_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, work: Callable[..., object]
) -> None:
    gate, learner, _ = gate_of(IDLE)
    note = Note(tmp_path, 16)
    pace = NamedPace(gate, note, learner)
    monkeypatch.setattr(type(gate), broken, fail)

    def take_and_work() -> None:
        take(learner, note)
        work(pace, learner, note)

    with pytest.raises(KeyError, match="of the pace"):
        take_and_work()
    note.close()
    said = Autopsy(tmp_path, steps_recur=False).judge(CRASHED)
    assert said == "; it was in the pace, which decides when to train"
    assert load_verdicts(tmp_path) == []


def test_what_comes_after_the_pace_has_its_own_name_again(tmp_path: Path) -> None:
    gate, learner, _ = gate_of(IDLE)
    note = Note(tmp_path, 16)
    pace = NamedPace(gate, note, learner)
    take(learner, note)
    assert note.at is Stage.TAKING
    step(pace, learner, note)
    assert note.at is Stage.TRAINING
    assert learner.steps_due == 0
    note.close()
    assert Autopsy(tmp_path, steps_recur=False).judge(CRASHED).startswith("; it was in loss() or the optimizer")

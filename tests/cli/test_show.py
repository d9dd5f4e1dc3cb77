"""Long lines and progress, with a terminal and without."""

from __future__ import annotations

import sys

import pytest

from mps_trainer.cli import show


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: now[0])
    with show.steps() as tell:
        for second, text in ((1, "starting"), (11, "1 of 7"), (12, "2 of 7"), (25, "3 of 7")):
            now[0] = 100.0 + second
            tell(text)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["- 1 of 7", "- 3 of 7"]


LONG = "* filter: {one: 1, two: 2, three: 3} and /a/path/that/is/longer/than/the/terminal/is/wide"


def test_a_long_line_goes_on_below_itself_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show.hanging(f"{LONG}\n  second", 4)
    assert capsys.readouterr().out.splitlines() == [
        "* filter: {one: 1, two: 2,",
        "    three: 3} and",
        "    /a/path/that/is/longer/than/the/terminal/is/wide",
        "  second",
    ]


def test_a_path_stays_beside_its_label_however_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show.hanging(f"{'metrics':12} {LONG.split()[-1]}", 13)
    assert capsys.readouterr().out == f"metrics      {LONG.split()[-1]}\n"


def test_elsewhere_it_stays_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    show.hanging(LONG, 4)
    assert capsys.readouterr().out == f"{LONG}\n"

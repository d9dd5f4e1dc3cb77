"""Progress where nobody looks at a terminal."""

from __future__ import annotations

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

"""What is said of a death, and of the ends that are none."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from test_autopsy import die

from mps_trainer.launcher.autopsy import Autopsy
from mps_trainer.run import exit_codes
from mps_trainer.run.verdicts import load_verdicts


@pytest.mark.parametrize("code", sorted(exit_codes.FINAL))
def test_an_end_without_a_successor_sets_nothing_aside(tmp_path: Path, code: int) -> None:
    die(tmp_path)
    assert Autopsy(tmp_path).judge(code) == ""
    assert load_verdicts(tmp_path) == []


def test_deaths_are_counted_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for said in ("set aside after 1 death:", "set aside after 2 deaths:"):
        die(tmp_path)
        Autopsy(tmp_path).judge(-signal.SIGSEGV)
        assert said in caplog.text

"""When a sidecar counts as hung; the end of one that does is in test_poison.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_helpers import wait_for

from mps_trainer.launcher import watchdog
from mps_trainer.launcher.watchdog import HUNG_GRACE_S, Watchdog
from mps_trainer.run.doing import DoingFile

SLEEPER = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1); print('up', flush=True); signal.pause()"


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(watchdog, "time", found)
    return found


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    log = (tmp_path / "sidecar.log").open("wb")
    process = subprocess.Popen([sys.executable, "-u", "-c", SLEEPER], stdout=log, stderr=log)
    wait_for(lambda: (tmp_path / "sidecar.log").stat().st_size, "the sleeper")
    yield process
    process.kill()
    process.wait()
    log.close()


def look_for(seconds: float, dog: Watchdog, child: subprocess.Popen[bytes], clock: Clock, **options: bool) -> str:
    said = ""
    for _ in range(int(2 * seconds)):
        clock.now += 0.5
        said = said or dog.look(child, **options)
    return said


def test_without_a_beat_it_hangs_and_its_stacks_are_in_the_log(
    tmp_path: Path, child: subprocess.Popen[bytes], clock: Clock
) -> None:
    file, dog = DoingFile(tmp_path, 1), Watchdog(tmp_path, 10)
    assert look_for(10, dog, child, clock) == ""
    file.beat()
    assert look_for(10, dog, child, clock) == ""
    assert dog.grace_s(30) == 30
    said = look_for(1, dog, child, clock)
    assert said == "it hung for 10 s (hang_timeout); its stacks are in sidecar.log"
    wait_for(lambda: "most recent call first" in (tmp_path / "sidecar.log").read_text(), "the stacks")
    assert (dog.found is not None, dog.grace_s(30), dog.more_s(30), dog.was_only_slow) == (True, HUNG_GRACE_S, 0, False)
    file.beat()
    assert (dog.grace_s(30), dog.more_s(30), dog.was_only_slow) == (HUNG_GRACE_S, 30 - HUNG_GRACE_S, True)


def test_one_that_goes_on_while_its_stacks_are_taken_does_not_hang(
    tmp_path: Path, child: subprocess.Popen[bytes], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, dog = DoingFile(tmp_path, 1), Watchdog(tmp_path, 10)
    monkeypatch.setattr(dog, "_dump_stacks", lambda _: file.beat())
    assert look_for(12, dog, child, clock) == ""
    assert dog.found is None


def test_a_log_that_somebody_removed_is_no_reason_to_end(
    tmp_path: Path, child: subprocess.Popen[bytes], clock: Clock
) -> None:
    DoingFile(tmp_path, 1)
    (tmp_path / "sidecar.log").unlink()
    monotonic = clock.monotonic
    clock.monotonic = lambda: setattr(clock, "now", clock.now + 0.2) or monotonic()  # type: ignore[method-assign]
    dog = Watchdog(tmp_path, 10)
    assert any(dog.look(child) for _ in range(200))


def test_time_in_which_nobody_looked_does_not_count(
    tmp_path: Path, child: subprocess.Popen[bytes], clock: Clock
) -> None:
    DoingFile(tmp_path, 1)
    dog = Watchdog(tmp_path, 10)
    dog.look(child)
    clock.now += 3600
    assert dog.look(child) == ""


def test_an_engine_that_measures_memory_holds_the_watchdog_and_off_is_off(
    tmp_path: Path, child: subprocess.Popen[bytes], clock: Clock
) -> None:
    DoingFile(tmp_path, 1)
    assert look_for(60, Watchdog(tmp_path, 0), child, clock) == ""
    dog = Watchdog(tmp_path, 10)
    assert look_for(60, dog, child, clock, hold=True) == ""
    clock.now += 0.5
    assert dog.look(child)


def test_a_sidecar_that_somebody_stopped_or_that_is_starting_does_not_hang(
    tmp_path: Path, child: subprocess.Popen[bytes], clock: Clock
) -> None:
    dog = Watchdog(tmp_path, 10)
    assert look_for(60, dog, child, clock) == ""
    DoingFile(tmp_path, 1)
    child.send_signal(19)
    wait_for(lambda: watchdog._is_stopped(child.pid), "the stop")
    assert look_for(60, dog, child, clock) == ""

"""What was measured is kept, whatever ends the rest; made-up sessions, no process but this one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from bench_helpers import session as measured
from bench_helpers import window

from mps_trainer.bench import options as flags
from mps_trainer.bench import run as bench_run
from mps_trainer.bench.arms import Here
from mps_trainer.bench.feed import Feed
from mps_trainer.bench.run import prepare, right
from mps_trainer.bench.saved import Saved
from mps_trainer.bench.trainers import SidecarTrainer
from mps_trainer.bench.work import find_work
from mps_trainer.cli import bench as cli
from mps_trainer.errors import MpsTrainerError, RunError, TransportError
from mps_trainer.mps.checks import read_surroundings
from mps_trainer.transport import leftovers

TWO = ("--tiny", "--separate", "--tasks", "A,token_outlier", "--arms", "none,sidecar-cpu", "--rounds", "1")


class MadeUpSession:
    """Measures one round, then raises what `ends` has for its task; before the round where `early` says so."""

    ends: ClassVar[dict[str, BaseException]] = {}
    early = True

    def __init__(self, plan: Any, *rest: Any) -> None:
        self.task, self.keep, self.rounds = plan.works[0].name, rest[-1], 0
        self.failed = ""

    def run(self) -> None:
        error = self.ends.get(self.task)
        if error is not None and self.early:
            raise error
        self.rounds = 1
        self.keep()
        if error is not None:
            raise error

    def found(self) -> list[dict[str, Any]]:
        windows = [window("none", 0, seconds=1.0), window("sidecar-cpu", 0, seconds=1.1, steps=3)] * self.rounds
        found = measured(windows, [2.0] * self.rounds)
        return [{**found, "task": self.task, "ended": {}, "failed": self.failed, "dedicated": "sidecar-cpu"}]


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bench_run, "Session", MadeUpSession)
    monkeypatch.setattr(MadeUpSession, "early", True)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def run(tmp_path: Path, *argv: str, keep: Any = lambda _: None) -> dict[str, Any]:
    benchmark = prepare(flags.parse(argv or TWO), read_surroundings(), Here())
    return bench_run.run(benchmark, tmp_path, lambda _: None, "a test", keep)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunError("the engine has ended")], ids=["ctrl-c", "engine"])
@pytest.mark.parametrize("early", [True, False], ids=["before-a-round", "after-it"])
def test_a_session_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, early: bool
) -> None:
    monkeypatch.setattr(MadeUpSession, "ends", {"token_outlier": error})
    monkeypatch.setattr(MadeUpSession, "early", early)
    results = run(tmp_path)
    assert [one["task"] for one in results["sessions"]] == ["A"] + ["token_outlier"] * (not early)
    assert set(results["not_run"]) == ({"token_outlier"} if early else set())
    why = "interrupted" if isinstance(error, KeyboardInterrupt) else "RunError: the engine has ended"
    assert any(why in note for note in results["notes"])
    assert results["sessions"][0]["rows"]
    assert not right(results)


def test_a_first_session_that_fails_leaves_the_ones_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUpSession, "ends", {"A": RunError("no engine")})
    results = run(tmp_path)
    assert [one["task"] for one in results["sessions"]] == ["token_outlier"]
    assert results["not_run"] == {"A": "RunError: no engine"}


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), RunError("no engine"), TransportError("no room in /dev/shm", "make room there")],
    ids=["ctrl-c", "engine", "ring"],
)
def test_what_ends_all_before_anything_was_measured_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(MadeUpSession, "ends", {"A": error, "token_outlier": error})
    with pytest.raises(type(error)) as raised:
        run(tmp_path)
    assert raised.value is error


def test_a_disk_that_ends_all_before_anything_was_measured_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(28, "No space left on device")
    monkeypatch.setattr(MadeUpSession, "ends", {"A": error, "token_outlier": error})
    with pytest.raises(RunError, match=r"nothing was measured: .*No space left"):
        run(tmp_path)


def test_each_round_is_on_disk_when_it_ends(tmp_path: Path) -> None:
    saved, seen = Saved(tmp_path / "deep" / "out"), []

    def keep(results: dict[str, Any]) -> None:
        saved.keep(results)
        on_disk = json.loads((tmp_path / "deep" / "out.json").read_text())
        seen.append((len(on_disk["sessions"]), on_disk["finished"], "Not finished" in on_disk["notes"][-1]))

    results = run(tmp_path, keep=keep)
    assert seen == [(1, False, True), (2, False, True)]
    assert results["finished"]
    assert right(results)
    saved.write(results)
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["out.json", "out.md"]


def test_results_go_elsewhere_when_their_place_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "gone").write_text("no folder")
    saved = Saved(tmp_path / "gone" / "out")
    results = run(tmp_path, keep=saved.keep)
    written = cli._save(saved, results)
    assert json.loads(written[0].read_text())["sessions"]
    assert written[0].name == "out.json"
    said = capsys.readouterr().err
    assert "cannot be written" in said
    assert str(written[0].parent) in said.replace("\n", "")


def test_a_second_interruption_waits_until_results_are_written() -> None:
    done = []

    def write() -> None:
        with cli._held_back():
            signal.raise_signal(signal.SIGINT)
            done.append("written")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == ["written"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_are_an_interruption(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), cli._signals_as_interrupt():
        signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_a_hangup_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cli._signals_as_interrupt(), cli._held_back():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_sidecar_that_is_killed_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPS_TRAINER_STATE_DIR", str(tmp_path / "s"))
    trainer = SidecarTrainer(find_work("A", {"width": 8, "hidden": [8, 8]}, 1), tmp_path, [5])
    try:
        trainer.start()
        trainer.resume()
        os.kill(trainer.pids()[0], signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(RunError, match=r"the sidecar ended .signal SIGKILL., last lines of its log: "):
            trainer.pause()
        with pytest.raises(RunError, match="signal SIGKILL"):
            trainer.resume()
        # Two minutes before.
        assert time.monotonic() - begin < 60
        assert "signal SIGKILL" in trainer.problem()
    finally:
        trainer.close()
    assert leftovers(trainer.run_id) == []


def test_a_feed_that_has_ended_says_so_when_it_is_resumed() -> None:
    gone = threading.Event()

    def send(_: Any) -> None:
        gone.set()
        raise RunError("the sidecar has ended")

    feed = Feed(iter([{}, {}, {}]), send, send)
    feed.start()
    feed.resume()
    assert gone.wait(90)
    feed.pause(10.0)
    assert "the sidecar has ended" in feed.error
    with pytest.raises(RunError, match="the sidecar has ended"):
        feed.resume()
    # At once, and not after the two minutes that it would have for coming to rest.
    feed.pause(0.0)
    feed.close()


@pytest.mark.parametrize(
    "flag",
    [
        "--trace /nope", "--trace /", "--seed -1", '--task-args {"A":5}', '--task-args {"Z":{}}', "--task-args x",
        "--gap ,", "--gap x", "--gap nan", "--work-dir /etc/passwd", "--work-dir /proc/x", "--out /proc/nope/x",
        "--out /", "--pin-engine 9999", "--pin-engine 3-1", "--pin-trainer x", "--rounds 99999999999",
        "--rounds 9999999", "--budget-s nan", "--budget-s -5", "--budget-s inf", "--dedicated-s nan",
        "--dedicated-s inf", "--dedicated-s -1", "--spread nan", "--operator-cores 0", "--train-steps -1",
        "--tiny-width 0", "--tiny-layers 0", "--closing -1", "--slowdown 5", "--slowdown nan", "--utilization 7",
        "--gpu -1", "--tasks A,A", "--tasks ,", "--arms none,none", "--pace-set margin=9", "--nonsense",
        "--pace-variant a:margin=.5 --pace-variant a:margin=.6",
    ],
)  # fmt: skip
def test_a_flag_without_sense_is_named(flag: str) -> None:
    with pytest.raises(MpsTrainerError) as caught:
        prepare(flags.parse(["--tiny", *flag.split(" ")]), read_surroundings(), Here())
    name = flag.split(" ")[0]
    said = str(caught.value)
    assert name in said or name in ("--gap", "--pace-set"), said
    assert caught.value.todo
    assert "_shares" not in said

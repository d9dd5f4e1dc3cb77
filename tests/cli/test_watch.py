"""`status` on one screen and `status --watch`: rows, widths, ends. The runs are folders and held locks."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mps_trainer.cli import screen, show
from mps_trainer.cli import watch as watching
from mps_trainer.cli.find_run import find_run_dir
from mps_trainer.cli.screen import Subject, sparkline
from mps_trainer.cli.watch import Watch, frame
from mps_trainer.errors import RunError
from mps_trainer.run import STATE_DIR_VARIABLE, HeldLock, State, Status, run_paths, try_hold
from mps_trainer.run.members import Member, save_members

Command = Callable[..., subprocess.CompletedProcess[str]]
RUN_ID = "0123abcd"


def write_run(run_dir: Path, **values: Any) -> Status:
    run_dir.mkdir(parents=True, exist_ok=True)
    known = {
        "version": 123_456, "experiences": 12_345_678, "batches": 48_225, "scored": 12_345_678, "loss": 0.2271,
        "first_loss": 0.699, "auc": 0.9382, "first_auc": 0.5334, "backlog": 4, "backlog_age_s": 1.25,
        "memory_bytes": 394_825_728, "pid": 4_194_303, "restarts": 2,
    }  # fmt: skip
    status = Status(run_id=RUN_ID, **{"state": State.READY, **known, **values})
    status.save(run_dir)
    now = time.time()
    lines = [
        {"kind": "batch", "t": now - 100 + i, "step": 123_000 + 4 * i, "experiences": 256 * i, "batch": i,
         "auc": 0.5 + i / 300, "loss": 1 / (1 + i)} for i in range(100)
    ]  # fmt: skip
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = {"seen_total": 12_345_678, "removed_total": 617_283, "late_total": 1_024, "score_wait_ms": 123.4}
    (run_dir / "operator.jsonl").write_text(json.dumps(line) + "\n")
    return status


@pytest.fixture
def alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldLock:
    """The lock that proves that the run lives."""
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / "state"))
    lock = try_hold(run_paths(RUN_ID).supervisor_lock)
    assert lock is not None
    return lock


def rendered(run_dir: Path, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(frame(Watch([Subject.of_folder(run_dir)]).look()))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_the_usual_rows_fit_in_80_columns_without_wrapping(alive: HeldLock, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    lines = rendered(tmp_path / "run")
    labels = [line[:10].strip() for line in lines if line]
    assert labels[:11] == (
        ["run", "state", "speed", "learned", "loss", "AUC", "backlog", "drops", "scores", "memory", "mps"]
    )
    assert "state       ready on cpu (process 4194303), 2 restarts" in lines
    assert "backlog     4 records in the ring, the oldest unread for 1.2 s" in lines
    assert "drops       617,283 of 12,345,678 by the operator, 0 lost to a full ring" in lines
    assert "scores      12,345,678 given, in 123.4 ms (p99 123.4), 1,024 late" in lines
    assert any(line.startswith("loss        0.227 now, 0.699 first   █") for line in lines)
    alive.release()


def test_speeds_are_of_the_last_half_minute(alive: HeldLock, tmp_path: Path) -> None:
    status = write_run(tmp_path / "run")
    figures = Watch([Subject.of_folder(tmp_path / "run")]).look()[0][1]
    begin = 123_000 + 4 * 70
    assert figures.steps_per_s == pytest.approx((status.version - begin) / 30, rel=0.3)
    alive.release()


def test_members_and_memory_on_a_shared_gpu(alive: HeldLock, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir, device="cuda:0", gpu_memory_bytes=2**30, memory_cap_bytes=4 * 2**30)
    (run_dir / "settings.json").write_text(json.dumps({"mps": "on"}))
    save_members(run_dir, [Member("rollout_0", 11, True, 0.8), Member("", 12, None)])
    text = " ".join(" ".join(rendered(run_dir)).split())
    assert "1.0 GiB of 4.0 GiB on the GPU (peak); process 376.5 MiB" in text
    assert "the sidecar is a client, proven before READY; rollout_0 (pid 11): an MPS client, proven" in text
    assert "engine (pid 12): not proven" in text
    alive.release()


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl", "operator.jsonl", "members.json", "settings.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"\n', b"\xff\n", b'{"t": "x"}\n', b'{"kind": "batch"}\n'])
def test_a_damaged_file_costs_its_own_rows_at_most(tmp_path: Path, name: str, content: bytes, alive: HeldLock) -> None:
    write_run(tmp_path / "run")
    subject = Subject.of_folder(tmp_path / "run")
    watch = Watch([subject])
    assert watch.look()[0][1].status is not None
    (tmp_path / "run" / name).write_bytes(content)
    [(_, figures, _)] = watch.look()
    assert figures.status is not None, "the last good word stays"
    assert screen.rows(subject, figures, alive=True)
    alive.release()


def test_a_restarting_sidecar_is_watched_on(alive: HeldLock, tmp_path: Path) -> None:
    write_run(tmp_path / "run", state=State.RESTARTING, error="it ended with SIGKILL; restart 1 of 5")
    lines = rendered(tmp_path / "run")
    assert any(line.startswith("state       restarting on cpu") for line in lines)
    assert "note        it ended with SIGKILL; restart 1 of 5" in lines
    alive.release()


def test_watching_ends_with_the_run_and_says_so(
    alive: HeldLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")

    def end_the_run(_: float) -> None:
        Status(run_id=RUN_ID, state=State.STOPPED, version=7).save(tmp_path / "run")
        alive.release()

    monkeypatch.setattr(watching.time, "sleep", end_the_run)
    Watch([Subject.of_folder(tmp_path / "run")]).run()
    first, last, end = capsys.readouterr().out.splitlines()
    assert f"{RUN_ID} ready  step 123456" in first
    assert f"{RUN_ID} stopped  step 7" in last
    assert end == f"run {RUN_ID} has ended: stopped"


def test_a_reader_that_is_gone_ends_the_watching(alive: HeldLock, environment: dict[str, str], tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    command = [sys.executable, "-m", "mps_trainer", "status", "--watch", "--every", "0.2", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert RUN_ID.encode() in child.stdout.readline()
        child.stdout.close()
        assert child.wait(90) == 0
    alive.release()


def test_ctrl_c_on_a_terminal_ends_the_watching_and_not_the_run(
    alive: HeldLock, environment: dict[str, str], tmp_path: Path
) -> None:
    write_run(tmp_path / "run")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mps_trainer", "status", "--watch", "--every", "0.2", str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"}
    ) as child:
        os.close(theirs)
        shown = read_until(ours, "Ctrl-C stops watching")
        assert "in 123.4 ms" in shown
        child.send_signal(signal.SIGINT)
        assert "stopped watching; the run goes on" in read_until(ours, "goes on\r\n")
        assert child.wait(90) == 0
    os.close(ours)
    alive.release()


def read_until(descriptor: int, text: str, limit_s: float = 90) -> str:
    """What a terminal showed, with `text`: bytes, since one read may end within a character."""
    found, deadline = b"", time.monotonic() + limit_s
    while text.encode() not in found:
        assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], found
        found += os.read(descriptor, 65536)
    return found.decode(errors="replace")


def test_in_a_pipe_a_row_is_one_line(mps_trainer: Command, tmp_path: Path) -> None:
    error = "word " * 60 + "end"
    write_run(tmp_path / "run", state=State.FAILED, error=error)
    out = mps_trainer("status", tmp_path / "run").stdout
    assert f"note        {error}\n" in out
    assert "\x1b" not in out


def test_bars() -> None:
    assert sparkline([1.0]) == ""
    assert sparkline([0, 7]) == "▁█"
    assert sparkline([3, 3, 3]) == "▄▄▄"
    assert len(sparkline(list(range(1000)))) == 28


def test_the_folder_above_and_a_wrong_one(tmp_path: Path) -> None:
    runs, told = tmp_path / "ckpt" / "lab" / "one.mps-trainer", []
    for i, run_id in enumerate(("aaaa0000", "bbbb0000")):
        write_run(runs / run_id)
        os.utime(runs / run_id / "status.json", (i, i))
    (runs / "latest").symlink_to("bbbb0000")
    assert find_run_dir(str(runs / "aaaa0000"), told.append) == runs / "aaaa0000"
    assert find_run_dir(str(runs / "latest"), told.append) == runs / "latest"
    assert told == []
    for above in (runs, tmp_path / "ckpt" / "lab", tmp_path / "ckpt", tmp_path):
        assert find_run_dir(str(above), told.append) == runs / "bbbb0000"
    assert all("taking the newest of 2 runs: bbbb0000" in text for text in told)
    write_run(tmp_path / "ckpt" / "lab" / "two.mps-trainer" / "cccc0000")
    with pytest.raises(RunError, match=r"several configs: .*one\.mps-trainer, .*two\.mps-trainer"):
        find_run_dir(str(tmp_path / "ckpt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="is no run folder and holds none"):
        find_run_dir(str(tmp_path / "empty"))


def test_a_text_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    show.rows([("loss", "0.2 ▁█", "")])

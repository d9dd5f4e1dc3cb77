"""What a person sees: help, messages, exit codes, and what the commands do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from mps_trainer.cli import look, runs
from mps_trainer.cli.app import run
from mps_trainer.launcher.process import Ended
from mps_trainer.launcher.runs import EndedRun, RunView
from mps_trainer.launcher.trinity_config import read_trinity_config
from mps_trainer.run import STATE_DIR_VARIABLE, RunPaths, RunRecord, State, Status, run_paths, try_hold
from mps_trainer.run.process import ProcessIdentity

Command = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("up", "run", "down", "status", "plan", "doctor", "report", "new-task", "check-task", "record", "bench")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(mps_trainer: Command, command: str) -> None:
    answer = mps_trainer(command, "--help")
    assert answer.returncode == 0
    assert f"Example: mps-trainer {command}" in " ".join(answer.stdout.split())


def test_help_names_every_command(mps_trainer: Command) -> None:
    answer = mps_trainer("--help")
    assert all(f"\n  {command} " in answer.stdout for command in COMMANDS)
    assert "..." not in answer.stdout.partition("Commands:")[2], "a summary is cut off"


def test_version(mps_trainer: Command) -> None:
    assert mps_trainer("--version").stdout.startswith("mps-trainer 0.")


_LOADED = """
import sys
from mps_trainer.cli.app import run
code = run(sys.argv[1:])
loaded = {name.partition(".")[0] for name in sys.modules}
heavy = sorted(loaded & {"torch", "ray", "trinity", "pyarrow", "pandas", "numpy"})
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(f"\\n{code} {heavy} {peak}")
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["plan", "CONFIG"], ["doctor"], ["status"], ["new-task", "my_task"]]
)
def test_the_command_line_is_lean(arguments: list[str], config: Path, environment: dict[str, str]) -> None:
    arguments = [str(config) if item == "CONFIG" else item for item in arguments]
    command = [sys.executable, "-c", _LOADED, *arguments]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=config.parent)
    code, heavy, peak_kib = answer.stdout.splitlines()[-1].split(" ")
    assert (code, heavy) == ("0", "[]"), answer.stdout + answer.stderr
    assert int(peak_kib) < 120 * 1024


def test_an_error_is_a_message_with_what_to_do_and_exit_2(mps_trainer: Command, tmp_path: Path) -> None:
    answer = mps_trainer("up", tmp_path / "no.yaml")
    assert answer.returncode == 2
    assert answer.stderr.splitlines() == [
        f"mps-trainer: no such file: {tmp_path / 'no.yaml'}",
        "  What to do: give the path of your Trinity YAML",
    ]


def test_brackets_in_a_message_are_no_markup(mps_trainer: Command) -> None:
    assert "no live run '[bold]x'" in mps_trainer("down", "[bold]x").stderr


def test_debug_shows_the_traceback(mps_trainer: Command, tmp_path: Path) -> None:
    assert "Traceback" in mps_trainer("--debug", "up", tmp_path / "no.yaml").stderr


def test_wrong_use_is_exit_2(mps_trainer: Command) -> None:
    assert mps_trainer("up").returncode == 2
    assert mps_trainer("run", "x.yaml", "--ray", "big").returncode == 2


def test_plan_prints_all_and_starts_nothing(mps_trainer: Command, config: Path, tmp_path: Path) -> None:
    before = config.read_bytes()
    answer = mps_trainer("plan", config)
    assert answer.returncode == 0
    for expected in ("* ring_slots: 2", "device: cpu, as you asked", "mps: off, since", '+ray_namespace: "lab/run"'):
        assert expected in answer.stdout
    assert config.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "state") == ["trinity.yaml"]
    assert list((tmp_path / "state").rglob("*.json")) == []


def test_up_with_a_disabled_operator_says_the_plain_command(mps_trainer: Command, config: Path) -> None:
    config.write_text(config.read_text().replace("ring_slots: 2", "enabled: false"))
    answer = mps_trainer("up", config)
    assert answer.returncode == 0
    assert answer.stdout == f"enabled is false in {config}: nothing to start. Run: trinity run --config {config}\n"


def test_report_prints_sentences_with_separators(mps_trainer: Command, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    Status(run_id="0123abcd", state=State.STOPPED, experiences=3584, batches=14, version=56).save(run_dir)
    line = {"kind": "batch", "step": 4, "batch": 1, "loss": 0.7, "auc": 0.5, "auc_window": 0.5, "dropped": {}}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    answer = mps_trainer("report", run_dir)
    assert answer.returncode == 0, answer.stderr
    assert "experiences  3,584 received in 14 batches" in answer.stdout
    assert "loss         0.700 first, 0.700 last   [0.70]" in answer.stdout
    assert f"picture      {run_dir / 'report.png'}" in answer.stdout
    assert f"page         {run_dir / 'report.html'}" in answer.stdout
    assert "first_loss" not in answer.stdout
    assert (run_dir / "report.png").exists()


def test_status_and_down_without_runs(mps_trainer: Command, config: Path) -> None:
    assert mps_trainer("status").stdout == "no live run\n"
    assert mps_trainer("down").returncode == 0
    assert mps_trainer("down", config).returncode == 0
    unknown = mps_trainer("down", "0123abcd")
    assert unknown.returncode == 2
    assert "no live run '0123abcd'; live runs: none" in unknown.stderr


def test_down_says_what_to_do_when_something_is_still_alive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = RunRecord(
        run_id="0123abcd",
        config="x.yaml",
        derived_config="x.mps.yaml",
        run_dir=str(tmp_path),
        ray_namespace="lab/run",
        settings={},
    )
    view = RunView(record, RunPaths(tmp_path / "0123abcd.json"), None, ProcessIdentity(4242, 1))
    ended = EndedRun(record.run_id, record.config, record.run_dir, Ended.STILL_ALIVE)
    monkeypatch.setattr(runs, "select_runs", lambda _: [view])
    monkeypatch.setattr(runs, "end_runs", lambda *_, **__: [ended])
    assert run(["down"]) == 1
    found = capsys.readouterr()
    assert "run 0123abcd: still alive" in found.out
    assert f"What to do: see supervisor.log and sidecar.log in {tmp_path}" in found.err
    assert "kill -KILL 4242" in found.err


_DESCRIPTORS = """
import os, sys
from mps_trainer.cli.app import run
code = run(["--version"])
print("nobody reads this", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    file.write(f"{code} {file.fileno() > 2} {[os.readlink(f'/proc/self/fd/{i}') for i in range(3)]}")
"""


def test_a_command_with_closed_descriptors_opens_them(environment: dict[str, str], tmp_path: Path) -> None:
    found = tmp_path / "found"
    command = [sys.executable, "-c", _DESCRIPTORS, str(found)]
    subprocess.run(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *command], env=environment, timeout=120, check=True)
    assert found.read_text() == f"0 True {['/dev/null'] * 3}"


def test_status_of_a_folder_says_whether_the_run_lives(
    mps_trainer: Command, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Status(run_id="0123abcd", state=State.READY).save(tmp_path)
    assert "state       ready (not running) on cpu, 0 restarts\n" in mps_trainer("status", tmp_path).stdout
    monkeypatch.setenv(STATE_DIR_VARIABLE, environment[STATE_DIR_VARIABLE])
    lock = try_hold(run_paths("0123abcd").supervisor_lock)
    assert lock is not None
    with lock:
        assert "state       ready on cpu, 0 restarts" in mps_trainer("status", tmp_path).stdout
    Status(run_id="0123abcd", state=State.STOPPED).save(tmp_path)
    assert "state       stopped on cpu, 0 restarts\n" in mps_trainer("status", tmp_path).stdout
    [found] = json.loads(mps_trainer("status", tmp_path, "--json").stdout)
    assert (found["run_id"], found["alive"], found["status"]["state"]) == ("0123abcd", False, "stopped")


def test_status_of_a_config_without_a_live_run_shows_its_newest(mps_trainer: Command, config: Path) -> None:
    none = mps_trainer("status", config)
    assert none.returncode == 2
    assert "has no run yet" in none.stdout + none.stderr
    runs = read_trinity_config(config).runs_dir
    (runs / "0123abcd").mkdir(parents=True)
    Status(run_id="0123abcd", state=State.STOPPED).save(runs / "0123abcd")
    assert "state       stopped on cpu, 0 restarts\n" in mps_trainer("status", config).stdout


def test_doctor_cleans_only_what_dead_runs_left(mps_trainer: Command, tmp_path: Path) -> None:
    mps_trainer("status")
    stale = tmp_path / "state" / "runs" / "0123abcd.json"
    stale.write_text("{}")
    # Shared memory is the whole machine's: what another run has just left there may be listed too.
    [line] = [line for line in mps_trainer("doctor").stdout.splitlines() if "of dead runs" in line]
    assert "0123abcd" in line
    answer = mps_trainer("doctor", "--clean")
    assert f"removed {stale}" in answer.stdout
    assert not stale.exists()
    stale.write_text("{}")
    assert "leftovers of dead runs removed" in mps_trainer("down").stdout
    assert not stale.exists()


def watch(environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mps_trainer", "status", "--watch", "--every", "0.1"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def read_until(lines: IO[str], text: str) -> str:
    """The next line with `text` in it; the time limit is that of the test."""
    return next(line for line in lines if text in line)


@pytest.mark.slow
def test_up_status_down_with_the_real_sidecar(mps_trainer: Command, config: Path, environment: dict[str, str]) -> None:
    door = {**environment, "MPS_TRAINER_VENV": sys.prefix}
    stack = contextlib.ExitStack()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config.write_text(config.read_text().replace("ring_slots: 2", f"prometheus_port: {port}\n          ring_slots: 2"))
    started = subprocess.run(
        [ROOT / "scripts" / "start_mps.sh", config], env=door, capture_output=True, text=True, timeout=120
    )
    try:
        assert started.returncode == 0, started.stderr
        assert "READY after" in started.stdout
        assert f"Prometheus metrics at http://127.0.0.1:{port}/metrics" in started.stderr
        assert (
            f"trinity run --config {os.path.relpath(config.with_name('trinity.mps.yaml'))}" in started.stdout
            or str(config.with_name("trinity.mps.yaml")) in started.stdout
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
            assert b'mps_trainer_sidecar_state{run_id="' in answer.read()
        [run] = json.loads(mps_trainer("status", "--json").stdout)
        assert (run["status"]["state"], run["device"], run["mps"]) == ("ready", "cpu", "off")
        assert run["run_id"] in mps_trainer("status").stdout
        watching = stack.enter_context(watch(environment))
        assert watching.stdout is not None
        read_until(watching.stdout, " ready ")
        os.kill(run["status"]["pid"], signal.SIGKILL)
        # That it restarts may be over before the next line.
        if " ready " not in read_until(watching.stdout, "restarts 1"):
            read_until(watching.stdout, " ready ")
        second = mps_trainer("up", config)
        assert second.returncode == 2
        assert f"mps-trainer down {run['run_id']}" in second.stderr
    finally:
        stopped = subprocess.run(
            [ROOT / "scripts" / "stop_mps.sh", config], env=door, capture_output=True, text=True, timeout=120
        )
    assert f"run {run['run_id']} has ended: stopped" in watching.communicate(timeout=90)[0]
    assert watching.returncode == 0
    stack.close()
    assert stopped.returncode == 0, stopped.stderr
    assert "ended when asked" in stopped.stdout
    assert "state       stopped on cpu, 1 restart" in mps_trainer("status", run["run_dir"]).stdout
    assert not list(Path("/dev/shm").glob(f"*mpst.{run['run_id']}*"))


def test_the_doors_say_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("start_mps.sh", "find_mps_trainer.sh"):
        (folder / name).write_text((ROOT / "scripts" / name).read_text())
    answer = subprocess.run(
        ["bash", folder / "start_mps.sh", "x.yaml"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 1
    assert "What to do" in answer.stderr


def test_status_says_when_batches_reach_the_gpu_slowly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = RunRecord(
        run_id="0123abcd", config="x.yaml", derived_config="", run_dir=str(tmp_path), ray_namespace="", settings={}
    )
    status = Status(run_id="0123abcd", state=State.READY)
    view = RunView(record, RunPaths(tmp_path / "0123abcd.json"), status, None)
    monkeypatch.setattr(look, "select_runs", lambda _: [view])
    for registered, told in ((None, False), (True, False), (False, True)):
        status.ring_registered = registered
        status.save(tmp_path)
        for arguments in (["status"], ["status", str(tmp_path)]):
            assert run(arguments) == 0
            assert ("ring_registered is False" in capsys.readouterr().out) is told

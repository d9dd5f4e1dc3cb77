"""The supervisor with real processes; the sidecar is the stand-in of fake_sidecar.py."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher_helpers import FAKE_SIDECAR, is_alive, kill, wait_for

from mps_trainer.errors import AlreadyRunningError, MpsTrainerError, RunError
from mps_trainer.launcher import run_locks, up
from mps_trainer.launcher.process import Ended
from mps_trainer.launcher.runs import end_runs, list_runs, select_runs
from mps_trainer.launcher.up import RunHandle, prepare, start_run
from mps_trainer.run import HeldLock, State, Status, is_held, new_run_id, run_paths, try_hold
from mps_trainer.run.process import ProcessIdentity

Write = Callable[..., Path]
Fake = Callable[[str], list[str]]


def start(config: Path, command: list[str], **kwargs: object) -> RunHandle:
    return start_run(prepare(config), sidecar_command=command, **kwargs)  # type: ignore[arg-type]


def fake_log(run_dir: Path) -> list[str]:
    path = run_dir / "fake.log"
    return path.read_text().splitlines() if path.exists() else []


def test_a_run_starts_shows_and_ends_in_order(write_config: Write, fake: Fake) -> None:
    lines: list[str] = []
    run = start(write_config(), fake("good"), progress=lines.append)
    assert run.status().state is State.READY
    assert [view.record.run_id for view in list_runs()] == [run.record.run_id]
    assert any("waiting until it is ready" in line for line in lines)
    # Whole experiences may come to lie in it.
    assert run.run_dir.stat().st_mode & 0o777 == 0o700
    files = [path for path in run.run_dir.iterdir() if path.name != "fake.log"]
    assert {path.name: path.stat().st_mode & 0o077 for path in files} == {path.name: 0 for path in files}
    assert run.run_dir / "settings.json" in files
    assert run.run_dir.with_name("latest").resolve() == run.run_dir

    assert run.stop() is Ended.BY_ITSELF
    assert fake_log(run.run_dir)[1:] == ["SIGTERM", "saved"]
    assert run.status().state is State.STOPPED
    assert list_runs() == []
    assert not run.paths.run_file.exists()


def test_down_ends_a_run_by_the_path_of_its_config(write_config: Write, fake: Fake) -> None:
    config = write_config()
    run = start(config, fake("good"))
    ended = end_runs(select_runs(str(config)))
    assert [(item.run_id, item.how) for item in ended] == [(run.record.run_id, Ended.BY_ITSELF)]
    run.supervisor.wait(5)
    with pytest.raises(RunError, match="no live run"):
        select_runs(str(config))


def test_a_killed_sidecar_is_restarted(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("good"))
    kill(run.sidecar_pid, signal.SIGKILL)
    wait_for(lambda: len([line for line in fake_log(run.run_dir) if line.startswith("start")]) == 2, "a second sidecar")
    wait_for(lambda: run.status().state is State.READY, "READY")
    assert run.status().pid != run.sidecar_pid
    assert run.stop() is Ended.BY_ITSELF


@pytest.mark.usefixtures("long_backoff")
def test_between_two_lives_the_status_says_restarting(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("good"))
    kill(run.sidecar_pid, signal.SIGKILL)
    wait_for(lambda: run.status().state is State.RESTARTING, "RESTARTING")
    status = run.status()
    assert status.restarts == 1
    assert "SIGKILL" in status.error
    run.stop()


def test_a_sidecar_that_keeps_crashing_is_given_up(write_config: Write, fake: Fake) -> None:
    config = write_config(("ring_slots: 2", "max_restarts: 1\n          ring_slots: 2"))
    run = start(config, fake("crash-when-ready"))
    assert run.supervisor.wait(90) == 1
    status = Status.load(run.run_dir)
    assert status.state is State.FAILED
    assert "max_restarts is 1" in status.error
    assert not is_held(run.paths.supervisor_lock)


def test_a_task_error_is_not_restarted(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("task-error-later"))
    assert run.supervisor.wait(90) == 3
    assert "the loss is nan in step 7" in Status.load(run.run_dir).error
    assert len([line for line in fake_log(run.run_dir) if line.startswith("start")]) == 1


def test_an_idle_sidecar_ends_the_run(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("idle"))
    assert run.supervisor.wait(90) == 0
    assert run.status().state is State.STOPPED
    assert list_runs() == []


def test_an_exit_with_0_that_nobody_asked_for_is_a_failure(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("exit-0"))
    assert run.supervisor.wait(90) == 1
    assert run.status().state is State.FAILED
    assert "exit code 0 without being asked\n  What to do: look for sys.exit()" in run.status().error


def test_up_tells_of_an_exit_with_0_before_ready(write_config: Write, fake: Fake) -> None:
    with pytest.raises(RunError, match="exit code 0 without being asked") as caught:
        start(write_config(), fake("exit-0-at-start"))
    assert "sidecar.log" in caught.value.todo


def test_up_reports_the_message_of_a_task_that_does_not_import(write_config: Write, fake: Fake) -> None:
    config = write_config()
    with pytest.raises(RunError, match="the task does not import") as caught:
        start(config, fake("task-error"))
    assert caught.value.todo == "install it"
    assert list_runs() == []
    assert not config.with_name("run.mps.yaml").exists()


def test_up_shows_the_log_of_a_sidecar_that_crashes_at_start(write_config: Write, fake: Fake) -> None:
    with pytest.raises(RunError, match=r"(?s)SIGKILL.*Segmentation fault in the driver"):
        start(write_config(), fake("crash-at-start"))


def test_up_names_the_limit_when_the_sidecar_is_silent(write_config: Write, fake: Fake) -> None:
    config = write_config(("ready_timeout: 120s", "ready_timeout: 500ms"))
    with pytest.raises(RunError, match="not ready after"):
        start(config, fake("silent"), grace_s=1.0)


@pytest.mark.parametrize("full", ["mps_trainer.run.RunRecord.save", "mps_trainer.launcher.up.write_private"])
def test_up_on_a_full_disk_is_an_error_and_leaves_nothing(
    write_config: Write, fake: Fake, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    config = write_config()
    monkeypatch.setattr(full, lambda *_: Path("/dev/full").write_text("x"))
    with pytest.raises(RunError, match="No space left on device") as caught:
        start(config, fake("good"))
    assert "free space" in caught.value.todo
    assert list_runs() == []
    assert not config.with_name("run.mps.yaml").exists()


def test_up_with_a_full_state_folder_is_an_error(
    write_config: Write, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(path: Path, note: str) -> HeldLock | None:
        if path.name.startswith("namespace"):
            Path("/dev/full").write_text(note)
        return try_hold(path, note)

    monkeypatch.setattr(run_locks, "try_hold", hold)
    config = write_config()
    with pytest.raises(RunError, match=r"cannot take the locks of run .*No space left on device"):
        start(config, fake("good"))
    assert list_runs() == []
    assert not config.with_name("run.mps.yaml").exists()


_UP = """
import signal
# A shell's background job (CI may be one) inherits SIGINT ignored, and Python then leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys
from pathlib import Path
from mps_trainer.launcher.up import prepare, start_run
start_run(prepare(Path(sys.argv[1])), sidecar_command=sys.argv[2:], progress=lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_up_that_is_ended_before_ready_leaves_nothing(write_config: Write, fake: Fake, number: int) -> None:
    up = subprocess.Popen(
        [sys.executable, "-c", _UP, str(write_config()), *fake("very-slow")], stdout=subprocess.PIPE, text=True
    )
    assert up.stdout is not None
    wait_for(lambda: "waiting until it is ready" in up.stdout.readline(), "the sidecar")
    [run] = list_runs()
    up.send_signal(number)
    up.wait(90)
    up.stdout.close()
    wait_for(lambda: list_runs() == [], "the end of the run")
    assert run.supervisor is not None
    wait_for(lambda: not run.supervisor.is_running, "the end of the supervisor")


def test_a_stubborn_sidecar_is_killed_after_its_grace(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("stubborn"), grace_s=3.0)
    run.stop()
    assert not is_alive(run.sidecar_pid)
    assert "SIGTERM" in fake_log(run.run_dir)
    assert "killed after it did not end in time" in run.status().error


@pytest.mark.usefixtures("long_backoff")
def test_an_end_during_the_backoff_drains_with_one_more_sidecar(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("good"))
    kill(run.sidecar_pid, signal.SIGKILL)
    wait_for(lambda: run.status().state is State.RESTARTING, "RESTARTING")
    assert run.stop() is Ended.BY_ITSELF
    assert run.supervisor.returncode == 0
    assert [line.split()[0] for line in fake_log(run.run_dir)] == ["start", "start", "SIGTERM", "saved"]
    assert run.status().state is State.STOPPED


def test_an_end_while_a_successor_starts_lets_it_get_ready_and_drain(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("slow"))
    kill(run.sidecar_pid, signal.SIGKILL)
    wait_for(lambda: [line[:4] for line in fake_log(run.run_dir)].count("slow") == 2, "a successor")
    assert run.stop() is Ended.BY_ITSELF
    assert fake_log(run.run_dir)[-2:] == ["SIGTERM", "saved"]
    assert run.status().state is State.STOPPED


@pytest.mark.usefixtures("long_backoff")
def test_an_end_during_the_backoff_whose_last_sidecar_crashes_is_failed(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("crash-when-ready"))
    wait_for(lambda: run.status().state is State.RESTARTING, "RESTARTING")
    assert run.stop() is Ended.BY_ITSELF
    assert run.status().state is State.FAILED
    assert "SIGKILL" in run.status().error


def test_the_sidecars_own_word_on_its_failure_stays_when_it_fails_while_it_ends(
    write_config: Write, fake: Fake
) -> None:
    run = start(write_config(), fake("fails-when-asked"))
    run.stop()
    assert run.status().state is State.FAILED
    assert run.status().error == "the loss is nan in step 7\n  What to do: lower the learning rate"


def test_an_exit_with_0_in_the_middle_of_the_end_is_a_failure(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("exit-0-when-asked"))
    run.stop()
    assert run.status().state is State.FAILED
    assert "exit code 0" in run.status().error


def test_a_healthy_life_gives_the_restarts_back(
    write_config: Write, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from mps_trainer.launcher import restarts, supervisor; restarts._HEALTHY_S = 0.1; "
        "sys.exit(supervisor.main())"
    )
    monkeypatch.setattr(up, "SUPERVISOR_COMMAND", (sys.executable, "-c", code))
    run = start(write_config(("ring_slots: 2", "max_restarts: 1\n          ring_slots: 2")), fake("good"))
    for count in (1, 2, 3):
        wait_for(lambda: run.status().state is State.READY, "READY")
        life = ProcessIdentity.of(run.status().pid)
        assert life is not None
        assert not life.wait(1.5), "the sidecar died by itself"
        kill(life.pid, signal.SIGKILL)
        # The total over the run goes on.
        wait_for(lambda count=count: run.status().restarts == count, f"restart {count}; {run.status()}")
    assert run.stop() is Ended.BY_ITSELF


def test_a_killed_supervisor_leaves_nothing(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("good"))
    run.supervisor.kill()
    run.supervisor.wait()
    wait_for(lambda: not is_alive(run.sidecar_pid), "the end of the sidecar")
    assert fake_log(run.run_dir)[-2:] == ["supervisor gone", "saved"]


def test_a_dropped_owner_lock_ends_the_run(write_config: Write, fake: Fake) -> None:
    run_id = new_run_id()
    owner = try_hold(run_paths(run_id).owner_lock)
    assert owner is not None
    run = start(write_config(), fake("good"), owner_lock=owner.path, run_id=run_id)
    assert run.supervisor.poll() is None
    owner.release()
    assert run.supervisor.wait(90) == 0
    assert fake_log(run.run_dir)[-1] == "saved"


def test_a_second_run_on_a_config_is_refused_and_names_the_first(write_config: Write, fake: Fake) -> None:
    config = write_config()
    run = start(config, fake("good"))
    derived = config.with_name("run.mps.yaml").read_text()
    with pytest.raises(
        AlreadyRunningError, match=rf"run {run.record.run_id} \(process {run.supervisor.pid}\)"
    ) as caught:
        start(config, fake("good"))
    assert f"mps-trainer down {run.record.run_id}" in caught.value.todo
    assert config.with_name("run.mps.yaml").read_text() == derived
    run.stop()


def test_a_second_run_on_a_namespace_is_refused(write_config: Write, fake: Fake, tmp_path: Path) -> None:
    first = write_config()
    run = start(first, fake("good"))
    second = tmp_path / "copy.yaml"
    second.write_text(first.read_text())
    with pytest.raises(AlreadyRunningError, match=r"the Ray namespace 'lab/run'"):
        start(second, fake("good"))
    run.stop()


def test_of_two_starts_at_the_same_instant_one_wins(write_config: Write, fake: Fake) -> None:
    config = write_config()
    barrier = threading.Barrier(2)
    results: list[RunHandle | MpsTrainerError] = []

    def up() -> None:
        barrier.wait()
        try:
            results.append(start(config, fake("good")))
        except MpsTrainerError as error:
            results.append(error)

    threads = [threading.Thread(target=up) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    winners = [item for item in results if isinstance(item, RunHandle)]
    losers = [item for item in results if isinstance(item, AlreadyRunningError)]
    assert (len(winners), len(losers)) == (1, 1)
    assert str(winners[0].paths.run_file) in config.with_name("run.mps.yaml").read_text()
    winners[0].stop()


def test_the_supervisor_is_lean(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("good"))
    status = Path(f"/proc/{run.supervisor.pid}/status").read_text()
    peak_kib = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
    maps = Path(f"/proc/{run.supervisor.pid}/maps").read_text()
    run.stop()
    assert peak_kib < 60 * 1024
    assert not any(name in maps for name in ("libtorch", "libarrow", "_raylet"))


def test_the_sidecar_gets_few_threads_and_no_gpu(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("good"))
    env = dict(
        item.split("=", 1) for item in Path(f"/proc/{run.sidecar_pid}/environ").read_text().split("\0") if "=" in item
    )
    run.stop()
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_a_supervisor_by_hand_takes_the_locks_itself(write_config: Write, fake: Fake) -> None:
    run = start(write_config(), fake("good"))
    command = [sys.executable, "-m", "mps_trainer.launcher.supervisor", "--run-file", str(run.paths.run_file)]
    command += ["--sidecar-command", json.dumps([sys.executable, str(FAKE_SIDECAR), "good"])]
    second = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert second.returncode == 4
    assert "already holds" in second.stderr
    assert run.paths.run_file.exists()
    run.stop()


def with_error(monkeypatch: pytest.MonkeyPatch, where: str, error: str) -> None:
    """A supervisor of which `where` raises once the file `break` is in the run folder."""
    code = f"""
import sys
from mps_trainer.errors import PlacementError
from mps_trainer.launcher import supervisor as module
usual = module.{where}
def broken(self, *args, **options):
    if (self._run_dir / "break").exists():
        raise {error}
    return usual(self, *args, **options)
module.{where} = broken
sys.exit(module.main())
"""
    monkeypatch.setattr(up, "SUPERVISOR_COMMAND", (sys.executable, "-c", code))


@pytest.mark.parametrize(
    "error", ["FileNotFoundError(2, 'no such binary')", "PlacementError('no answer', 'ask again')"]
)
def test_an_error_of_the_supervisor_ends_the_sidecar_in_order_and_the_run_says_why(
    write_config: Write, fake: Fake, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    with_error(monkeypatch, "Watchdog.look", error)
    run = start(write_config(), fake("good"))
    (run.run_dir / "break").touch()
    assert run.supervisor.wait(90) == 1
    assert fake_log(run.run_dir)[1:] == ["SIGTERM", "saved"]
    assert run.status().state is State.FAILED
    assert ("no such binary" in run.status().error) == ("no such" in error)
    assert ("no answer\n  What to do: ask again" in run.status().error) == ("no answer" in error)
    assert "Traceback" in (run.run_dir / "supervisor.log").read_text()
    assert list_runs() == []


def test_an_error_of_the_supervisor_before_ready_is_told_at_up(
    write_config: Write, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from mps_trainer.launcher import supervisor as m; "
        "m.SidecarProcess.read_answers = lambda self: 1 / 0; sys.exit(m.main())"
    )
    monkeypatch.setattr(up, "SUPERVISOR_COMMAND", (sys.executable, "-c", code))
    with pytest.raises(RunError, match="the supervisor failed: ZeroDivisionError") as caught:
        start(write_config(), fake("good"))
    assert "supervisor.log" in caught.value.todo
    assert list_runs() == []


def test_a_full_disk_costs_the_status_and_not_the_run(
    write_config: Write, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from pathlib import Path; from mps_trainer.run import Status; "
        "Status.save = lambda *_: Path('/dev/full').write_text('x'); "
        "from mps_trainer.launcher import supervisor as m; sys.exit(m.main())"
    )
    monkeypatch.setattr(up, "SUPERVISOR_COMMAND", (sys.executable, "-c", code))
    run = start(write_config(), fake("good"))
    kill(run.sidecar_pid, signal.SIGKILL)
    wait_for(lambda: len([line for line in fake_log(run.run_dir) if line.startswith("start")]) == 2, "a second sidecar")
    assert run.stop() is Ended.BY_ITSELF
    assert "status.json does not say restarting" in (run.run_dir / "supervisor.log").read_text()


@pytest.mark.parametrize("asked", [True, False])
def test_a_sidecar_that_outlives_sigkill_is_reported_and_not_waited_for(
    write_config: Write, fake: Fake, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    # As one in the hands of a driver; here nobody sends the signal.
    code = (
        "import subprocess, sys; from mps_trainer.launcher import process, supervisor as m; "
        "process.KILL_SECONDS = 0.3; subprocess.Popen.kill = lambda self: None; "
        f"m.Watchdog.look = lambda *_, **__: {'' if asked else 'it hung'!r}; sys.exit(m.main())"
    )
    monkeypatch.setattr(up, "SUPERVISOR_COMMAND", (sys.executable, "-c", code))
    run = start(write_config(), fake("stubborn"), grace_s=0.5)
    if asked:
        run.supervisor.send_signal(signal.SIGTERM)
    assert run.supervisor.wait(90) == 1
    # The status is the stand-in's, which has ended in order since.
    said = (run.run_dir / "supervisor.log").read_text()
    assert f"process {run.sidecar_pid} is still there" in said
    assert "the kernel does not let it go" in said
    assert "Traceback" not in said
    assert len([line for line in fake_log(run.run_dir) if line.startswith("start")]) == 1
    wait_for(lambda: not is_alive(run.sidecar_pid), "the end of the sidecar")

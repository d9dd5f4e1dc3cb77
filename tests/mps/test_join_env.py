"""`join: env` and strangers over a whole run, all of ours real; GPU, daemon and engine are recorded or fake."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from mps_helpers import UUIDS, VERL, VLLM, join, nothing_is_left, supervisor_log, wait_for

from mps_trainer.cli.runs import _show_what_follows
from mps_trainer.errors import ConfigError
from mps_trainer.launcher.run_trinity import TrinityOptions, run_trinity
from mps_trainer.mps.folder import mps_folder


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """Write NVML's list of GPU 0 and the daemon's list of clients."""
    there, answers = tmp_path / "processes.json", tmp_path / "answers.json"
    monkeypatch.setenv("FAKE_NVML_PROCESSES", str(there))
    monkeypatch.setenv("FAKE_MPS_ANSWERS", str(answers))

    def write(pids, clients=()):
        rows = "".join(f"{pid} 1 466 {UUIDS[0]} 4026531836 x\n" for pid in clients)
        _replace(answers, {"ps": f"PID ID SERVER DEVICE NAMESPACE COMMAND\n{rows}"})
        _replace(there, {UUIDS[0]: list(pids)})

    write([])
    return write


def _replace(path, value):
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def test_recorded_run_that_joins_by_environment_lowers_the_number_once_and_proves_by_pid(
    start, on_gpu, process, capsys
):
    run = start("cuda:0", 1, join="env")
    text = run.derived.path.read_text()
    (line,) = [line for line in text.splitlines() if "gpu_memory_utilization" in line]
    share = float(line.split(":")[1].split("#")[0])
    assert 0.9 < share < 0.95
    assert line.endswith("   # most of it")
    assert "-    gpu_memory_utilization: 0.95   # most of it" in run.derived.diff
    assert run.ray_environment == {"CUDA_MPS_PIPE_DIRECTORY": str(mps_folder(run.record.run_id).pipe_dir)}
    _show_what_follows(Path("run.yaml"), run)
    said = capsys.readouterr().out
    export = f"export CUDA_MPS_PIPE_DIRECTORY={mps_folder(run.record.run_id).pipe_dir}\n"
    assert export in said
    assert said.index(export) < said.index("ray start --head")
    # Never both: the plugin is installed, finds the run, and does nothing.
    assert not mps_folder(run.record.run_id).summons_socket.exists()
    found = join(run, UUIDS[0])
    assert (found["used"], found["env"]) == (0.95, {})
    core, verl = process(VLLM), process(VERL)
    on_gpu([run.sidecar_pid, core.pid], [run.sidecar_pid, core.pid, verl.pid])
    wait_for(lambda: "proven to be an MPS client" in supervisor_log(run))
    wait_for(lambda: "became an MPS client too" in supervisor_log(run))
    assert run.supervisor.poll() is None
    run.stop()
    nothing_is_left(run.record.run_id)


def test_recorded_plugin_run_has_nothing_for_the_shell_of_ray(start, capsys):
    run = start("cuda:0", 1)
    assert run.ray_environment == {}
    _show_what_follows(Path("run.yaml"), run)
    assert "export" not in capsys.readouterr().out.replace("export RAY_ADDRESS", "")
    assert "0.95   # most of it" in run.derived.path.read_text()
    assert "utilization" not in run.derived.diff


def test_recorded_verl_worker_on_the_gpu_ends_a_run_that_insists_and_names_it(start, on_gpu, process):
    run = start("cuda:0", 1, mps="on")
    verl = process(VERL)
    on_gpu([run.sidecar_pid, verl.pid], [run.sidecar_pid])
    run.supervisor.wait(90)
    status = run.status()
    assert status.state.value == "failed"
    assert f"process {verl.pid} ({VERL} 60)" in status.error
    assert "What to do" in status.error
    assert "saved" in (run.run_dir / "fake.log").read_text(), "the sidecar ended in order"
    assert verl.poll() is None
    nothing_is_left(run.record.run_id)


def test_recorded_verl_worker_on_the_gpu_pauses_a_run_that_does_not_insist(start, on_gpu, process):
    run = start("cuda:0", 1, mps="auto")
    pause = mps_folder(run.record.run_id).pause_file
    verl = process(VERL)
    on_gpu([run.sidecar_pid, verl.pid], [run.sidecar_pid])
    wait_for(pause.exists)
    assert str(verl.pid) in pause.read_text()
    on_gpu([run.sidecar_pid], [run.sidecar_pid])
    wait_for(lambda: not pause.exists())
    said = supervisor_log(run)
    assert said.count("launches nothing") == 1
    assert "the sidecar goes on" in said
    run.stop()
    nothing_is_left(run.record.run_id)


def test_recorded_processes_that_were_there_before_are_said_at_the_start_and_left_alone(start, on_gpu, process):
    notebook = process("jupyter")
    on_gpu([notebook.pid])
    run = start("cuda:0", 1, mps="on")
    assert f"(pid {notebook.pid})" in supervisor_log(run)
    on_gpu([run.sidecar_pid, notebook.pid], [run.sidecar_pid])
    with pytest.raises(subprocess.TimeoutExpired):
        run.supervisor.wait(5)
    assert not mps_folder(run.record.run_id).pause_file.exists()


@pytest.mark.parametrize(("ray", "address"), [("existing", "auto"), ("auto", "10.0.0.1:6379")])
def test_recorded_ray_that_runs_already_cannot_join_by_environment(planned, ray, address):
    prepared = planned("cuda:0", 1, join="env")
    prepared = replace(prepared, config=replace(prepared.config, ray_address=address))
    with pytest.raises(ConfigError, match="starts after the run's MPS daemon"):
        run_trinity(prepared, TrinityOptions(sink=print, progress=print, ray=ray))
    assert list(mps_folder("x").path.parent.glob("*")) == []

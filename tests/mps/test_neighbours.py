"""Who else is on the sidecar's GPU: real processes with real titles; what NVML and the daemon say is recorded."""

import json
import time

import pytest
from mps_helpers import VERL, VLLM
from test_checks import H200

from mps_trainer.errors import PlacementError
from mps_trainer.launcher.neighbours import Neighbours
from mps_trainer.launcher.process_titles import command_line, engine_title, ray_title
from mps_trainer.mps.nvml import GpuProcess
from mps_trainer.mps.summons import EngineRecord, EngineRequest

SIDECAR = "python3"


@pytest.fixture
def gpu(fake_daemon, state, monkeypatch):
    """A recorded GPU: `there` is NVML's list, `clients` the daemon's."""
    fake_daemon.start()
    answers = state / "answers.json"
    monkeypatch.setenv("FAKE_MPS_ANSWERS", str(answers))

    class Gpu:
        def __init__(self):
            self.there = []

        def clients(self, *pids):
            rows = "".join(f"{pid} 1 466 {H200.uuid} 4026531836 x\n" for pid in pids)
            answers.write_text(json.dumps({"ps": f"PID ID SERVER DEVICE NAMESPACE COMMAND\n{rows}"}))

        def neighbours(self, **options):
            def look(uuid):
                assert uuid == H200.uuid
                return [GpuProcess(pid, 2**30, "") for pid in self.there]

            return Neighbours(fake_daemon, H200.uuid, look=look, every_s=0.0, **options)

    made = Gpu()
    made.clients()
    return made


def engine(pid, state, actor="explorer_rollout_model_0_0"):
    return EngineRecord(EngineRequest((H200.uuid,), actor, pid), state)


def look_twice(watch, sidecar, engines=()):
    watch.look(sidecar.pid, engines)
    watch.look(sidecar.pid, engines)


def test_recorded_neighbours_of_a_run_alone_on_its_gpu_are_nobodys_business(gpu, process):
    sidecar, actor = process(SIDECAR), process("ray::vLLMRolloutModel")
    gpu.there = [sidecar.pid, actor.pid]
    watch = gpu.neighbours(insist=True)
    look_twice(watch, sidecar, [engine(actor.pid, "ready")])
    assert (watch.reason, watch.refusal) == ("", None)


def test_recorded_server_of_another_run_on_another_gpu_is_no_stranger(gpu, process):
    sidecar, server = process(SIDECAR), process("nvidia-cuda-mps-server")
    gpu.there = [sidecar.pid, server.pid]
    watch = gpu.neighbours(insist=True)
    look_twice(watch, sidecar)
    assert (watch.reason, watch.refusal) == ("", None)


def test_recorded_verl_worker_pauses_with_auto_and_the_sidecar_goes_on_when_it_is_gone(gpu, process):
    sidecar, verl = process(SIDECAR), process(VERL)
    gpu.there = [sidecar.pid, verl.pid]
    watch = gpu.neighbours()
    watch.look(sidecar.pid, [])
    assert watch.reason == "", "seen once: it may be just ending"
    watch.look(sidecar.pid, [])
    assert f"process {verl.pid} ({VERL} 60)" in watch.reason
    assert "no rollout engine" in watch.reason
    assert watch.refusal is None
    gpu.there = [sidecar.pid]
    watch.look(sidecar.pid, [])
    assert watch.reason == ""


def test_recorded_verl_worker_ends_the_run_with_on_but_not_while_an_engine_measures(gpu, process):
    sidecar, verl, actor = process(SIDECAR), process(VERL), process("ray::vLLMRolloutModel")
    gpu.there = [sidecar.pid, verl.pid]
    watch = gpu.neighbours(insist=True)
    look_twice(watch, sidecar, [engine(actor.pid, "starting")])
    assert watch.reason
    assert watch.refusal is None
    watch.look(sidecar.pid, [engine(actor.pid, "ready")])
    assert isinstance(watch.refusal, PlacementError)
    assert str(verl.pid) in watch.refusal.message
    assert VERL in watch.refusal.message
    assert "device: cuda:<n>" in watch.refusal.todo


def test_recorded_process_that_was_there_before_is_left_to_the_checks(gpu, process):
    sidecar, notebook = process(SIDECAR), process("jupyter")
    gpu.there = [sidecar.pid, notebook.pid]
    watch = gpu.neighbours(before=[notebook.pid], insist=True)
    look_twice(watch, sidecar)
    assert watch.reason == ""


@pytest.mark.parametrize(
    ("plugins", "words"), [({}, "did not join"), ({"VLLM_PLUGINS": "lora"}, "VLLM_PLUGINS=lora leaves mps_trainer out")]
)
def test_recorded_engine_without_the_plugin_has_a_message_of_its_own(gpu, process, plugins, words):
    sidecar, core = process(SIDECAR), process(VLLM, **plugins)
    gpu.there = [sidecar.pid, core.pid]
    watch = gpu.neighbours(insist=True)
    look_twice(watch, sidecar)
    assert words in watch.refusal.message
    assert str(core.pid) in watch.refusal.message
    assert "join: env" in watch.refusal.todo


def test_recorded_engine_that_was_told_to_stay_alone_is_one_that_did_not_join(gpu, process):
    sidecar, actor = process(SIDECAR), process("python3")
    gpu.there = [sidecar.pid, actor.pid]
    watch = gpu.neighbours()
    look_twice(watch, sidecar, [engine(actor.pid, "alone")])
    assert "did not join" in watch.reason


def test_recorded_client_of_a_plugin_run_that_never_asked_is_a_stranger_too(gpu, process):
    sidecar, verl = process(SIDECAR), process(VERL)
    gpu.there = [sidecar.pid, verl.pid]
    gpu.clients(sidecar.pid, verl.pid)
    watch = gpu.neighbours()
    look_twice(watch, sidecar)
    assert str(verl.pid) in watch.reason


def test_recorded_clients_of_join_env_are_proven_by_pid_and_told_apart(gpu, process, caplog):
    caplog.set_level("INFO")
    sidecar, core, verl, other = process(SIDECAR), process(VLLM), process(VERL), process("tool")
    gpu.there = [sidecar.pid, core.pid]
    gpu.clients(sidecar.pid, core.pid, verl.pid, other.pid)
    watch = gpu.neighbours(join="env", insist=True)
    look_twice(watch, sidecar)
    assert (watch.reason, watch.refusal) == ("", None)
    said = [record.getMessage() for record in caplog.records]
    assert f"engine {VLLM} 60 (process {core.pid}) is up and proven to be an MPS client" in said
    assert len([line for line in said if f"process {verl.pid}" in line and "became an MPS client too" in line]) == 1
    assert any("every CUDA process of that shell" in line for line in said)
    assert not any(str(sidecar.pid) in line for line in said)


def test_recorded_engine_of_join_env_that_is_no_client_names_the_line_to_export(gpu, process):
    sidecar, core = process(SIDECAR), process(VLLM)
    gpu.there = [sidecar.pid, core.pid]
    gpu.clients(sidecar.pid)
    watch = gpu.neighbours(join="env", insist=True)
    look_twice(watch, sidecar)
    assert "did not join" in watch.refusal.message
    assert "export CUDA_MPS_PIPE_DIRECTORY=" in watch.refusal.todo


def test_recorded_list_with_pids_of_another_namespace_accuses_nobody(gpu, process, caplog):
    sidecar, innocent = process(SIDECAR), process("sshd")
    gpu.there = [innocent.pid]
    watch = gpu.neighbours(insist=True)
    look_twice(watch, sidecar)
    assert (watch.reason, watch.refusal) == ("", None)
    assert sum("does not list the sidecar" in record.getMessage() for record in caplog.records) == 1


def test_a_gpu_that_says_nothing_pauses_nobody_and_is_asked_now_and_then(fake_daemon, process):
    sidecar, asked = process(SIDECAR), []

    def look(uuid):
        asked.append(uuid)
        raise PlacementError("NVML does not say")

    watch = Neighbours(fake_daemon, H200.uuid, look=look, every_s=30.0)
    for _ in range(3):
        watch.look(sidecar.pid, [])
    assert watch.reason == ""
    assert len(asked) == 1


def test_a_look_at_known_neighbours_asks_no_daemon_and_is_cheap(gpu, process, fake_daemon):
    sidecar = process(SIDECAR)
    gpu.there = [sidecar.pid]
    watch = gpu.neighbours()
    look_twice(watch, sidecar)
    fake_daemon.quit()
    begin = time.process_time()
    for _ in range(50):
        watch.look(sidecar.pid, [])
    assert (time.process_time() - begin) / 50 < 0.05


def test_titles_of_processes(process):
    core, verl = process(VLLM), process(VERL)
    assert engine_title(core.pid) == f"{VLLM} 60"
    assert engine_title(verl.pid) == ""
    assert ray_title(verl.pid) == f"{VERL} 60"
    assert command_line(2**22 + 1) == ""

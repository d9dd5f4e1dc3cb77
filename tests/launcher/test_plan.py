"""Decisions over recorded readings of machines: no GPU is needed, and none is pretended to the code under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from mps_trainer.config import load_settings
from mps_trainer.errors import ConfigError, PlacementError
from mps_trainer.launcher.gpu import Gpu, GpuReading, read_gpus
from mps_trainer.launcher.gpu_share import DEFAULT_POOL
from mps_trainer.launcher.machine import Machine, read_machine
from mps_trainer.launcher.plan import Plan, make_plan
from mps_trainer.launcher.trinity_config import read_trinity_config

Write = Callable[..., Path]
GIB = 2**30

# nvmlDeviceGetMemoryInfo of an H200 with nothing on it, driver 580: total 150,754,820,096.
H200 = Gpu(0, "GPU-11111111-2222-3333-4444-555555555555", "NVIDIA H200", 150_754_820_096, 150_110_208_000)
BUSY_H200 = Gpu(1, "GPU-66666666-2222-3333-4444-555555555555", "NVIDIA H200", 150_754_820_096, 2 * GIB)

LAPTOP = Machine(16 * GIB, 8 * GIB, 8 * GIB, 8 * GIB, GpuReading(missing="no NVML (NVML Shared Library Not Found)"))
ONE_GPU = Machine(256 * GIB, 200 * GIB, 64 * GIB, 64 * GIB, GpuReading((H200,), "580.95.05"))
TWO_GPUS = Machine(256 * GIB, 200 * GIB, 64 * GIB, 64 * GIB, GpuReading((H200, BUSY_H200), "580.95.05"))


def plan(path: Path, machine: Machine) -> Plan:
    return make_plan(read_trinity_config(path), machine)


def refused(path: Path, machine: Machine) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        plan(path, machine)
    assert caught.value.todo, "an error without what to do"
    return caught.value


def settings(*lines: str) -> tuple[str, str]:
    return ("device: cpu   # no GPU on my laptop", "\n          ".join(lines))


def test_auto_without_a_gpu_is_the_cpu_and_says_why_in_one_line(write_config: Write) -> None:
    found = plan(write_config(settings("device: auto", "mps: auto")), LAPTOP)
    assert (found.device, found.mps) == ("cpu", "off")
    [line] = [reason for reason in found.reasons if reason.startswith("mps:")]
    assert line == "mps: off, since there is no GPU here: no NVML (NVML Shared Library Not Found)"


def test_mps_on_without_a_gpu_is_refused_with_the_reason(write_config: Write) -> None:
    assert "there is no GPU here" in refused(write_config(settings("mps: on")), LAPTOP).message


def test_a_gpu_that_is_not_there_without_any(write_config: Write) -> None:
    assert "it has no GPU, no NVML" in refused(write_config(settings("device: cuda:3")), LAPTOP).message


def test_a_gpu_that_is_not_there_recorded_two_h200(write_config: Write) -> None:
    message = refused(write_config(settings("device: cuda:3")), TWO_GPUS).message
    assert "it has cuda:0 (NVIDIA H200), cuda:1 (NVIDIA H200)" in message


def test_auto_without_mps_takes_the_gpu_with_most_free_memory_recorded_two_h200(write_config: Write) -> None:
    assert plan(write_config(settings("device: auto", "mps: off")), TWO_GPUS).device == "cuda:0"


def test_auto_with_mps_waits_for_the_first_engine_recorded_two_h200(write_config: Write) -> None:
    found = plan(write_config(settings("device: auto")), TWO_GPUS)
    assert (found.device, found.mps) == ("cuda", "on")
    resolved = found.resolve(load_settings({}))
    assert load_settings(resolved.dump()) == resolved, "the sidecar cannot read what the plan made of the settings"
    assert "summons" in found.reasons[0]


def test_one_gpu_is_shared_with_a_default_reservation_recorded_h200(write_config: Write) -> None:
    found = plan(write_config(settings("device: auto", "mps: auto")), ONE_GPU)
    assert (found.device, found.mps, found.memory) == ("cuda:0", "on", DEFAULT_POOL)


@pytest.mark.parametrize(
    ("problem", "rules_out"),
    [
        (("MPS control", "nvidia-cuda-mps-control is not on the PATH"), True),
        (("cuda:0", "NVIDIA H200 is cut into MIG instances"), True),
        (("cuda:1", "NVIDIA H200 is cut into MIG instances"), False),
    ],
)
def test_what_rules_mps_out_is_said_recorded_h200(
    write_config: Write, problem: tuple[str, str], rules_out: bool
) -> None:
    machine = replace(ONE_GPU, mps_problems=(problem,))
    found = plan(write_config(settings("device: cuda:0", "mps: auto")), machine)
    assert found.mps == ("off" if rules_out else "on")
    if rules_out:
        assert any(problem[1] in reason for reason in found.reasons)
        assert problem[1] in refused(write_config(settings("device: cuda:0", "mps: on")), machine).message


def test_join_env_caps_every_engine_in_the_plan_recorded_h200(write_config: Write) -> None:
    found = plan(write_config(settings("device: auto", "join: env")), ONE_GPU)
    assert (found.device, found.mps) == ("cuda:0", "on")
    assert found.utilization is not None
    assert 0.9 < found.utilization < 0.95
    assert any(f"at most gpu_memory_utilization {found.utilization:.3f}" in line for line in found.reasons)
    more = plan(write_config(settings("device: cuda:0", "join: env", "memory: 40GiB")), ONE_GPU)
    assert more.utilization is not None
    assert more.utilization < found.utilization - 0.2
    assert plan(write_config(settings("device: cuda:0")), ONE_GPU).utilization is None
    assert plan(write_config(settings("device: cuda:0", "join: env", "mps: off")), ONE_GPU).utilization is None


def test_join_env_has_no_engine_that_could_say_where_it_is_recorded_two_h200(write_config: Write) -> None:
    error = refused(write_config(settings("device: auto", "join: env")), TWO_GPUS)
    assert "with join: env no engine does" in error.message
    assert "device: cuda:<n>" in error.todo
    assert plan(write_config(settings("device: cuda:0", "join: env")), TWO_GPUS).device == "cuda:0"
    assert plan(write_config(settings("device: auto", "join: env", "mps: off")), TWO_GPUS).mps == "off"


def test_a_plugin_list_without_us_rules_out_the_plugin_only_recorded_h200(write_config: Write) -> None:
    machine = replace(ONE_GPU, mps_problems=(("VLLM_PLUGINS", "VLLM_PLUGINS=lora leaves mps_trainer out"),))
    assert plan(write_config(settings("device: cuda:0")), machine).mps == "off"
    assert plan(write_config(settings("device: cuda:0", "join: env")), machine).mps == "on"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("model: {", "explorer: {rollout_model: {engine_type: sglang}}\nmodel: {"), "engine_type is sglang"),
        (("model: {", "model: {tinker: {enable: true}, "), "model.tinker.enable"),
    ],
)
def test_engines_without_vllm_recorded_h200(write_config: Write, change: tuple[str, str], name: str) -> None:
    assert name in refused(write_config(settings("device: cuda:0", "mps: on"), change), ONE_GPU).message
    found = plan(write_config(settings("device: cuda:0", "mps: auto"), change), ONE_GPU)
    assert found.mps == "off"
    assert any(name in reason for reason in found.reasons)


def test_colocate_is_refused_on_a_gpu_and_allowed_on_the_cpu_recorded_h200(write_config: Write) -> None:
    colocate = ("mode: explore", "mode: colocate")
    with pytest.raises(ConfigError, match="colocate puts vLLM and verl on one GPU"):
        plan(write_config(settings("device: auto"), colocate), ONE_GPU)
    assert plan(write_config(colocate), ONE_GPU).device == "cpu"


def test_more_memory_than_the_machine_has_names_the_largest_that_fits(write_config: Write) -> None:
    error = refused(write_config(settings("device: cpu", "memory: 12GiB")), LAPTOP)
    assert "memory asks for 12.0 GiB, but this machine has 8.0 GiB free of 16.0 GiB" in error.message
    assert error.todo == "ask for at most memory: 8192MiB"


def test_more_memory_than_the_gpu_has_recorded_h200(write_config: Write) -> None:
    error = refused(write_config(settings("device: cuda:0", "memory: 200GiB")), ONE_GPU)
    assert "cuda:0 (NVIDIA H200) has 139.8 GiB free of 140.4 GiB" in error.message


def test_memory_on_the_cpu_is_called_a_wish(write_config: Write) -> None:
    [line] = [reason for reason in plan(write_config(settings("device: cpu", "memory: 1GiB")), LAPTOP).reasons
              if reason.startswith("memory:")]  # fmt: skip
    assert line == "memory: 1.0 GiB of 8.0 GiB free on this machine: on the CPU a wish, not a limit"


def test_a_share_of_memory_is_resolved_to_bytes(write_config: Write) -> None:
    path = write_config(settings("device: cpu", "memory_fraction: 0.25"))
    found = plan(path, LAPTOP)
    assert found.memory == 4 * GIB
    resolved = found.resolve(read_trinity_config(path).settings)
    assert (resolved.memory, resolved.memory_fraction, resolved.mps) == (4 * GIB, None, "off")


def test_a_small_dev_shm_is_refused_with_numbers(write_config: Write) -> None:
    small = Machine(16 * GIB, 8 * GIB, 64 * 2**20, 2 * 2**20)
    error = refused(write_config(), small)
    assert "/dev/shm has 2.0 MiB free of 64.0 MiB" in error.message
    assert "need 3.0 MiB" in error.message
    assert "ring_slot" in error.todo
    assert "--shm-size" in error.todo


def test_the_default_rings_fit_the_64_mb_of_a_container(write_config: Write) -> None:
    path = write_config(("          ring_slots: 2\n          ring_slot: 1MiB\n", ""))
    plan(path, Machine(16 * GIB, 8 * GIB, 64 * 2**20, 64 * 2**20))


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert 0 < machine.memory_free <= machine.memory_total
    assert 0 < machine.shm_free <= machine.shm_total
    assert bool(machine.gpu.gpus) != bool(machine.gpu.why_none() if not machine.gpu.gpus else "")


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_machine_without_nvml_is_an_answer_recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    for other in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, other, lambda: None)
    monkeypatch.setattr(pynvml, name, missing)
    reading = read_gpus()
    assert reading.gpus == ()
    assert "NVML" in reading.why_none()

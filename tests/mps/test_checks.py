"""Judgements on recorded NVML values and made-up surroundings."""

from dataclasses import replace

import pytest

from mps_trainer.errors import PlacementError
from mps_trainer.mps.checks import Surroundings, require_possible, run_checks
from mps_trainer.mps.folder import MpsFolder
from mps_trainer.mps.nvml import GpuFacts, GpuProcess, NvmlFacts, read_nvml

H200 = GpuFacts(
    index=0,
    uuid="GPU-0f3cc1cf-565d-9b0a-543c-d4b754f70410",
    name="NVIDIA H200",
    total=150754820096,
    used=0,
    compute_mode="default",
    mig=False,
)


@pytest.fixture
def around(tmp_path):
    folder = MpsFolder(tmp_path.__class__("/tmp/mps-trainer-0/mps/abcd1234"))
    return Surroundings(NvmlFacts((H200,), "580.159.04"), folder, "/usr/bin/nvidia-cuda-mps-control", env={})


def with_gpu(around, **changes):
    return replace(around, nvml=replace(around.nvml, gpus=(replace(H200, **changes),)))


def test_recorded_h200_has_nothing_in_the_way(around):
    checks = run_checks(around)
    assert {check.level for check in checks} == {"ok"}
    require_possible(checks)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: replace(a, nvml=NvmlFacts(missing="no NVML (Driver Not Loaded)")), "Driver Not Loaded"),
        (lambda a: replace(a, nvml=NvmlFacts()), "no GPU"),
        (lambda a: replace(a, nvml=replace(a.nvml, driver="470.57")), "470.57"),
        (lambda a: replace(a, binary=None), "not on the PATH"),
        (lambda a: replace(a, folder=MpsFolder(a.folder.path / ("x" * 90))), "socket path"),
        (lambda a: replace(a, env={"VLLM_PLUGINS": "lora,other"}), "leaves mps_trainer out"),
        (lambda a: with_gpu(a, mig=True), "MIG"),
        (lambda a: with_gpu(a, compute_mode="prohibited"), "prohibited"),
        (
            lambda a: replace(a, nvml=replace(a.nvml, gpus=(H200, replace(H200, index=1, name="NVIDIA L4")))),
            "mixes NVIDIA H200, NVIDIA L4",
        ),
    ],
)
def test_what_rules_mps_out_is_a_problem_with_something_to_do(around, change, words):
    checks = run_checks(change(around))
    problems = [check for check in checks if check.level == "problem"]
    assert len(problems) == 1
    assert words in problems[0].found
    assert problems[0].todo
    with pytest.raises(PlacementError, match="MPS is not possible here"):
        require_possible(checks)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: replace(a, container="/.dockerenv"), "container"),
        (lambda a: replace(a, default_daemon=True), "/tmp/nvidia-mps"),
        (lambda a: replace(a, env={"CUDA_MPS_PIPE_DIRECTORY": "/x"}), "CUDA_MPS_PIPE_DIRECTORY=/x"),
        (lambda a: replace(a, env={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G"}), "0=2G"),
        (lambda a: with_gpu(a, compute_mode="exclusive_process"), "exclusive_process"),
        (lambda a: with_gpu(a, processes=(GpuProcess(7, 1, "nvidia-cuda-mps-server"),)), "pid 7"),
        (lambda a: with_gpu(a, processes=(GpuProcess(8, 1, "python3"),)), "python3 (pid 8)"),
    ],
)
def test_what_needs_care_is_a_warning_and_not_in_the_way(around, change, words):
    checks = run_checks(change(around))
    warnings = [check for check in checks if check.level == "warning"]
    assert len(warnings) == 1
    assert words in warnings[0].found
    assert warnings[0].todo
    require_possible(checks)


def test_plugins_that_name_us_and_gpus_in_bus_order_are_fine(around):
    mixed = replace(around.nvml, gpus=(H200, replace(H200, index=1, name="NVIDIA L4")))
    env = {"VLLM_PLUGINS": "mps_trainer,lora", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    require_possible(run_checks(replace(around, nvml=mixed, env=env)))


def test_a_plugin_list_without_us_is_no_problem_for_those_who_do_without_the_plugin(around):
    checks = run_checks(replace(around, env={"VLLM_PLUGINS": "lora"}))
    with pytest.raises(PlacementError, match="leaves mps_trainer out"):
        require_possible(checks)
    require_possible(checks, plugin=False)


def test_only_the_named_gpu_is_judged(around):
    two = replace(around.nvml, gpus=(replace(H200, mig=True), replace(H200, index=1, uuid="GPU-1")))
    require_possible(run_checks(replace(around, nvml=two), "GPU-1"))
    with pytest.raises(PlacementError, match="cuda:0"):
        require_possible(run_checks(replace(around, nvml=two), H200.uuid))


def test_this_machine_can_be_read_with_or_without_nvml():
    facts = read_nvml()
    assert bool(facts.gpus) != bool(facts.missing) or facts.driver

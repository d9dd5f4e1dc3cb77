"""Two GPUs without two GPUs: NVML's values are recorded, the control binary, the engine and the training are fake."""

import json
import os
import subprocess
import sys

import pytest
from mps_helpers import HERE, UUIDS, join, nothing_is_left, supervisor_log, wait_for
from test_checks import H200
from test_summons import ask, share  # noqa: F401  # share is a fixture

from mps_trainer.errors import MpsTrainerError
from mps_trainer.launcher.memory_plan import ENGINE_EXTRA
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.lease import take_gpu

# Ray hands out ordinals; which UUID that is, is for (recorded) NVML to say.
RAY = {"PYTHONPATH": os.pathsep.join([str(HERE / "fake_vllm"), str(HERE / "fake_nvml"), *sys.path])}


@pytest.mark.parametrize("ordinal", [0, 1])
def test_rays_ordinal_in_the_actor_means_the_recorded_gpu_of_that_index(start, ordinal):
    run = start(f"cuda:{ordinal}", 2)
    assert join(run, str(ordinal), **RAY)["env"]
    found = join(run, str(1 - ordinal), **RAY)
    assert (found["used"], found["env"]) == (0.95, {}), "the engine on the other GPU is left as it is"
    said = supervisor_log(run)
    assert f"{UUIDS[ordinal]}): joins the sidecar on {UUIDS[ordinal]}" in said
    assert f"{UUIDS[1 - ordinal]}): the sidecar of this run is on another GPU ({UUIDS[ordinal]})" in said


def test_device_cuda_1_leases_the_second_recorded_gpu_only(start):
    run = start("cuda:1", 2)
    placement = json.loads((mps_folder(run.record.run_id).path / "placement.json").read_text())
    assert placement["gpu_uuid"] == UUIDS[1]
    take_gpu(UUIDS[0], "somebody else").release()
    with pytest.raises(MpsTrainerError, match=run.record.run_id):
        take_gpu(UUIDS[1], "somebody else")


def test_two_runs_on_two_recorded_gpus_coexist_and_a_third_is_refused_with_the_holders_name(start):
    first, second = start("cuda:0", 2, name="one"), start("cuda:1", 2, name="two")
    with pytest.raises(MpsTrainerError, match=f"GPU {UUIDS[1]} is taken by run {second.record.run_id}"):
        start("cuda:1", 2, name="three")
    pipes = {join(run, str(i), **RAY)["env"]["CUDA_MPS_PIPE_DIRECTORY"] for i, run in enumerate((first, second))}
    assert pipes == {str(mps_folder(run.record.run_id).pipe_dir) for run in (first, second)}
    first.stop()
    assert join(second, "1", **RAY)["env"], "the end of one run is nothing to the other"
    second.stop()
    nothing_is_left(first.record.run_id)
    nothing_is_left(second.record.run_id)


def test_summons_to_the_second_recorded_gpu_by_rays_ordinal(start):
    run = start("auto", 2)
    assert join(run, "1", **RAY)["env"]
    placement = json.loads((mps_folder(run.record.run_id).path / "placement.json").read_text())
    assert placement["gpu_uuid"] == UUIDS[1]


def test_engine_over_both_recorded_gpus_joins_and_is_warned_about_the_blast_radius(start):
    run = start("cuda:1", 2)
    assert join(run, "0,1", **RAY)["env"]
    assert "it spans 2 GPUs: an illegal memory access in the sidecar would take the whole engine down" in (
        supervisor_log(run)
    )


def test_fake_daemon_engines_on_one_recorded_gpu_share_the_plan(share):  # noqa: F811
    made = share("cuda:0")
    made.start()
    made.sidecar_is_ready()
    first = ask([H200.uuid])
    whole = first.answer.utilization
    first.tell("config", wished=0.4, utilization=0.4)
    wait_for(lambda: made.engines[0].utilization == 0.4)
    # From another process: one process is one engine.
    code = (
        "import sys\nfrom pathlib import Path\nfrom mps_trainer.mps.summons import EngineRequest, EngineSession\n"
        "print(EngineSession(Path(sys.argv[1]), EngineRequest((sys.argv[2],), 'rollout'), 90.0).answer.utilization)"
    )
    command = [sys.executable, "-c", code, mps_folder("abcd1234").summons_socket, H200.uuid]
    second = float(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    assert second <= whole - 0.4 - ENGINE_EXTRA / H200.total
    assert second > whole - 0.4 - ENGINE_EXTRA / H200.total - 0.002

"""What clients, strangers and the daemon get to see."""

from pathlib import Path

import pytest

from mps_trainer.errors import PlacementError
from mps_trainer.mps.environment import daemon_env, sidecar_env, without_mps
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.placement import GpuPlacement

UUID = "GPU-0f3cc1cf-565d-9b0a-543c-d4b754f70410"
SHELL = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "CUDA_MPS_PIPE_DIRECTORY": "/theirs", "CUDA_HOME": "/cuda"}


def test_the_sidecar_gets_one_limit_for_the_one_gpu_that_it_sees():
    env = sidecar_env(Path("/pipe"), UUID, 4 * 2**30 + 5)
    assert env == {
        "CUDA_MPS_PIPE_DIRECTORY": "/pipe",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{UUID}=4096M",
        "CUDA_VISIBLE_DEVICES": UUID,
    }
    # A second entry, or one for a GPU that is not visible, would drop the limit without a word.
    assert "," not in env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
    assert sidecar_env(Path("/pipe"), UUID, 2**30, 25)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"


@pytest.mark.parametrize("name", ["0", "cuda:0", "", "MIG-1234"])
def test_a_limit_by_anything_but_a_gpu_uuid_is_refused(name):
    with pytest.raises(PlacementError, match="no GPU UUID"):
        sidecar_env(Path("/pipe"), name, 2**30)


def test_strangers_join_no_daemon_and_the_daemon_sees_every_gpu():
    assert without_mps(SHELL) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_HOME": "/cuda",
        "CUDA_MPS_PIPE_DIRECTORY": "/dev/null",
    }
    env = daemon_env(SHELL, Path("/pipe"), Path("/log"))
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert (env["CUDA_MPS_PIPE_DIRECTORY"], env["CUDA_MPS_LOG_DIRECTORY"]) == ("/pipe", "/log")


def test_a_placement_comes_back_as_it_was_saved_and_drops_the_shells_mps(state):
    folder = mps_folder("abcd1234")
    with pytest.raises(PlacementError, match="no placement"):
        GpuPlacement.load(folder)
    folder.make()
    placement = GpuPlacement(gpu_uuid=UUID, pool=2**30, limit=2 * 2**30)
    placement.save(folder)
    assert GpuPlacement.load(folder) == placement
    env = placement.environment(SHELL, folder)
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == str(folder.pipe_dir)
    assert env["CUDA_VISIBLE_DEVICES"] == UUID
    assert env["CUDA_LAUNCH_BLOCKING"] == "1"
    assert env["CUDA_HOME"] == "/cuda"
    free = GpuPlacement(gpu_uuid=UUID, pool=1, limit=2**30, blocking_launches=False)
    assert "CUDA_LAUNCH_BLOCKING" not in free.environment({}, folder)

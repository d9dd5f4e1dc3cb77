"""The environment that makes a process a client of a daemon, or keeps it from being one.

CUDA reads these variables once, when it is initialised; set later they do nothing. A wrong pipe directory is no
error to CUDA: the process then runs without MPS and without any limit. So whoever sets them proves the membership
afterwards (`MpsDaemon.clients`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mps_trainer.errors import PlacementError

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
LIMIT_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PRIORITY_VARIABLE = "CUDA_MPS_CLIENT_PRIORITY"

# No daemon can have its sockets there, and CUDA takes that for "no MPS".
NO_PIPE_DIR = "/dev/null"


def sidecar_env(
    pipe_dir: Path, gpu_uuid: str, limit_bytes: int, share_percent: int = 100, priority: int = 1
) -> dict[str, str]:
    """Variables that make the sidecar a low-priority client with a memory limit on one GPU.

    Args:
        pipe_dir: the daemon's pipe directory.
        gpu_uuid: the full UUID ("GPU-..."). It is also the one visible device: an entry for a GPU that the process
            does not see would drop every limit without a word.
        limit_bytes: all that the process may take, its CUDA context included; rounded down to MiB.
        share_percent: 100 leaves the SMs unrestricted. Less than that gives silently wrong products on some
            GPUs, so a caller proves it with `sidecar.gpu.numerics`.
        priority: 1 is the lower one, 0 that of everybody; a benchmark compares them.
    """
    if not gpu_uuid.startswith("GPU-"):
        raise PlacementError(f"{gpu_uuid!r} is no GPU UUID", "pass the full UUID that `nvidia-smi -L` prints")
    env = {
        PIPE_VARIABLE: str(pipe_dir),
        PRIORITY_VARIABLE: str(priority),
        LIMIT_VARIABLE: f"{gpu_uuid}={limit_bytes // 2**20}M",
        "CUDA_VISIBLE_DEVICES": gpu_uuid,
    }
    if share_percent != 100:
        env[SHARE_VARIABLE] = str(share_percent)
    return env


def without_mps(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` for a process that must not join any daemon, not even one at CUDA's default path."""
    return {**{k: v for k, v in env.items() if not k.startswith("CUDA_MPS_")}, PIPE_VARIABLE: NO_PIPE_DIR}


def daemon_env(env: Mapping[str, str], pipe_dir: Path, log_dir: Path) -> dict[str, str]:
    """A copy of `env` for a daemon that sees every GPU.

    A daemon with CUDA_VISIBLE_DEVICES renumbers the devices, and then the ordinals that Ray hands out are wrong.
    """
    kept = {k: v for k, v in env.items() if not k.startswith("CUDA_MPS_") and k != "CUDA_VISIBLE_DEVICES"}
    return {**kept, PIPE_VARIABLE: str(pipe_dir), LOG_VARIABLE: str(log_dir)}

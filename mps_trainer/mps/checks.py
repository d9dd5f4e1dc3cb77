"""What stands in the way of sharing a GPU through MPS, looked at without starting anything.

`doctor` prints these; `up` stops at the first problem. Judgements are made on recorded facts (`Surroundings`), so
that they can be tested without a GPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mps_trainer.errors import PlacementError
from mps_trainer.mps.control import CONTROL_BINARY
from mps_trainer.mps.environment import LIMIT_VARIABLE, PIPE_VARIABLE, SHARE_VARIABLE
from mps_trainer.mps.folder import MAX_SOCKET_PATH, MpsFolder, mps_folder
from mps_trainer.mps.nvml import GpuFacts, NvmlFacts, read_nvml
from mps_trainer.run import STATE_DIR_VARIABLE

# The oldest driver that has a pinned memory limit per client and everything else used here (CUDA 12).
OLDEST_DRIVER = 525
_SERVER = "nvidia-cuda-mps-server"
#: vLLM loads only the plugins that it lists; all of them when it is not set.
PLUGINS_VARIABLE = "VLLM_PLUGINS"
_DEFAULT_PIPE_DIR = Path("/tmp/nvidia-mps")


@dataclass(frozen=True)
class MpsCheck:
    """One finding, and what to do when it is not ok. A problem rules MPS out."""

    name: str
    level: Literal["ok", "warning", "problem"]
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What the checks look at, apart from the GPU itself.

    Attributes:
        binary: path of the control binary; None when it is not there.
        folder: where the run's daemon would live.
        container: what says that this is a container; "" when nothing does.
        default_daemon: a live daemon's socket at CUDA's default path.
        env: the variables that children would inherit.
    """

    nvml: NvmlFacts
    folder: MpsFolder
    binary: str | None = None
    container: str = ""
    default_daemon: bool = False
    uid: int = field(default_factory=os.getuid)
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def read_surroundings(run_id: str = "00000000") -> Surroundings:
    """Read this machine."""
    return Surroundings(
        nvml=read_nvml(),
        folder=mps_folder(run_id),
        binary=shutil.which(CONTROL_BINARY),
        container=_container(),
        default_daemon=(_DEFAULT_PIPE_DIR / "control").exists(),
    )


def run_checks(around: Surroundings, gpu_uuid: str | None = None) -> list[MpsCheck]:
    """All checks; those of a GPU for `gpu_uuid`, or for each GPU."""
    general = [
        check_driver(around.nvml),
        check_binary(around.binary),
        check_socket_path(around.folder),
        check_container(around.container),
        *check_environment(around.env),
        *check_default_daemon(around.default_daemon),
        *check_order_of_gpus(around.nvml, around.env),
    ]
    gpus = [gpu for gpu in around.nvml.gpus if gpu_uuid in (None, gpu.uuid)]
    return general + [check for gpu in gpus for check in check_gpu(gpu)]


def require_possible(checks: list[MpsCheck], *, plugin: bool = True) -> None:
    """PlacementError with every problem that was found; without the plugin (`join: env`) none of its own counts."""
    problems = [c for c in checks if c.level == "problem" and (plugin or c.name != PLUGINS_VARIABLE)]
    if problems:
        raise PlacementError(
            "MPS is not possible here: " + "; ".join(f"{check.name}: {check.found}" for check in problems),
            " / ".join(check.todo for check in problems),
        )


def check_driver(nvml: NvmlFacts) -> MpsCheck:
    """A driver that NVML reaches and that is new enough."""
    if nvml.missing or not nvml.gpus:
        return MpsCheck("driver", "problem", nvml.missing or "NVML sees no GPU", "use device: cpu, or mps: off")
    major = int(nvml.driver.partition(".")[0] or 0)
    if major < OLDEST_DRIVER:
        return MpsCheck("driver", "problem", nvml.driver, f"install driver {OLDEST_DRIVER} or newer, or set mps: off")
    return MpsCheck("driver", "ok", nvml.driver)


def check_binary(binary: str | None) -> MpsCheck:
    """The control binary."""
    if binary is None:
        todo = "install nvidia-compute-utils of the driver's version (in a container: mount it), or set mps: off"
        return MpsCheck("MPS control", "problem", f"{CONTROL_BINARY} is not on the PATH", todo)
    return MpsCheck("MPS control", "ok", binary)


def check_socket_path(folder: MpsFolder) -> MpsCheck:
    """Socket paths that fit into what Linux allows."""
    length = folder.longest_socket_path
    found = f"the longest socket path has {length} of {MAX_SOCKET_PATH} bytes"
    if length > MAX_SOCKET_PATH:
        return MpsCheck("MPS folder", "problem", found, f"set {STATE_DIR_VARIABLE} to a short local folder")
    return MpsCheck("MPS folder", "ok", found)


def check_container(container: str) -> MpsCheck:
    """Daemon, sidecar and engine must be of one container and one user."""
    if container:
        todo = "run Ray's processes of this node in the same container and as the same user as this command"
        return MpsCheck("container", "warning", f"this is a container ({container})", todo)
    return MpsCheck("container", "ok", "none")


def check_environment(env: Mapping[str, str]) -> Iterator[MpsCheck]:
    """MPS variables of the shell, which engines started from it would inherit."""
    for name in (PIPE_VARIABLE, LIMIT_VARIABLE, SHARE_VARIABLE):
        if env.get(name):
            yield MpsCheck(
                "environment",
                "warning",
                f"{name}={env[name]} is set in this shell",
                f"unset {name} before `ray start`: it would reach every engine",
            )
    plugins = env.get(PLUGINS_VARIABLE)
    if plugins is not None and "mps_trainer" not in plugins.split(","):
        yield MpsCheck(
            PLUGINS_VARIABLE,
            "problem",
            f"VLLM_PLUGINS={plugins} leaves mps_trainer out, so no engine can join",
            "add mps_trainer to VLLM_PLUGINS, unset it, or use join: env",
        )


def check_default_daemon(there: bool) -> Iterator[MpsCheck]:
    """A daemon at CUDA's default path takes every CUDA process that names no other."""
    if there:
        yield MpsCheck(
            "foreign daemon",
            "warning",
            f"somebody's MPS daemon listens in {_DEFAULT_PIPE_DIR}",
            "it is left alone; processes that name no pipe directory join it, this project's do not",
        )


def check_order_of_gpus(nvml: NvmlFacts, env: Mapping[str, str]) -> Iterator[MpsCheck]:
    """On a machine with GPUs of several kinds CUDA counts them in another order than NVML and Ray."""
    kinds = {gpu.name for gpu in nvml.gpus}
    if len(kinds) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield MpsCheck(
            "order of GPUs",
            "problem",
            f"this machine mixes {', '.join(sorted(kinds))}, and CUDA_DEVICE_ORDER is not PCI_BUS_ID",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID before `ray start` and before this command",
        )


def check_gpu(gpu: GpuFacts) -> Iterator[MpsCheck]:
    """MIG, the compute mode, and who is on the GPU."""
    name = f"cuda:{gpu.index}"
    if gpu.mig:
        todo = "MPS limits do not hold on MIG instances: use another GPU or mps: off; this tool never changes MIG"
        yield MpsCheck(name, "problem", f"{gpu.name} is cut into MIG instances", todo)
    if gpu.compute_mode == "prohibited":
        yield MpsCheck(name, "problem", "its compute mode is prohibited", "ask its administrator, or use another GPU")
    elif gpu.compute_mode.startswith("exclusive"):
        todo = "fine while every process on it is a client of this run; a verl worker there would be refused"
        yield MpsCheck(name, "warning", f"its compute mode is {gpu.compute_mode}", todo)
    servers = [process.pid for process in gpu.processes if process.name == _SERVER]
    if servers:
        todo = "wait until it has ended, or name another GPU; it is left alone"
        yield MpsCheck(name, "warning", f"another MPS server works there (pid {servers[0]})", todo)
    others = [process for process in gpu.processes if process.name != _SERVER]
    if others:
        who = ", ".join(f"{process.name or '?'} (pid {process.pid})" for process in others[:4])
        todo = "engines of this run must start after `up`, or they cannot join; others take turns with the sidecar"
        yield MpsCheck(name, "warning", f"already used by {who}", todo)
    if not (gpu.mig or gpu.processes or gpu.compute_mode != "default"):
        yield MpsCheck(name, "ok", f"{gpu.name}, nobody on it")


def _container() -> str:
    for sign in ("/.dockerenv", "/run/.containerenv"):
        if Path(sign).exists():
            return sign
    return "Kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else ""

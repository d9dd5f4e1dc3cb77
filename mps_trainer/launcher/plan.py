"""The plan: where the sidecar trains, whether through MPS, with how much memory; each decision with its reason.

Pure decisions over one reading of the machine (`machine.py`), so that they can be tested with recorded readings.
"""

from __future__ import annotations

from dataclasses import dataclass

from mps_trainer.config import Settings, format_size
from mps_trainer.errors import ConfigError, PlacementError
from mps_trainer.launcher.advice import advise
from mps_trainer.launcher.gpu import Gpu
from mps_trainer.launcher.gpu_share import DEFAULT_POOL
from mps_trainer.launcher.machine import Machine
from mps_trainer.launcher.memory_plan import plan_for_any_engine
from mps_trainer.launcher.trinity_config import TrinityConfig
from mps_trainer.mps.checks import PLUGINS_VARIABLE

# What a channel holds beside the feed slots: a header page, and four reply slots of 256 KiB.
CHANNEL_OVERHEAD = 4096 + 4 * 256 * 2**10

_NO_VLLM = {
    "sglang": "explorer.rollout_model.engine_type is sglang",
    "external": "explorer.rollout_model.engine_type is external, which runs no engine here",
    "tinker": "model.tinker.enable is true, so the rollout runs elsewhere",
}


@dataclass(frozen=True)
class Plan:
    """A resolved placement.

    Attributes:
        device: "cpu", "cuda:<n>", or "cuda": the GPU of the first rollout engine.
        mps: "on" or "off".
        memory: the sidecar's reservation in bytes; None leaves it to the task.
        shm: bytes of /dev/shm for one operator's channel.
        num_gpus: GPUs that NVML sees.
        utilization: the highest gpu_memory_utilization in the derived config (`join: env`); None leaves it alone.
        reasons: one line for each decision.
    """

    device: str
    mps: str
    memory: int | None
    shm: int
    num_gpus: int
    reasons: tuple[str, ...]
    utilization: float | None = None

    def resolve(self, settings: Settings) -> Settings:
        """The settings with `auto` and shares replaced by what was decided."""
        # "cuda" is no word of the user's: until an engine has said which GPU it is, auto stays auto.
        device = "auto" if self.device == "cuda" else self.device
        return settings.model_copy(
            update={"device": device, "mps": self.mps, "memory": self.memory, "memory_fraction": None}
        )


def make_plan(config: TrinityConfig, machine: Machine) -> Plan:
    """Decide the placement; PlacementError or ConfigError says why it is not possible here."""
    settings = config.settings
    device, why_device = _decide_device(settings, machine)
    if config.mode == "colocate" and device != "cpu":
        raise ConfigError(
            "mode: colocate puts vLLM and verl on one GPU, and neither leaves room for a third process",
            "set device: cpu in the operator's args, or use mode: explore or both",
        )
    mps, why_mps = _decide_mps(config, device, machine)
    if mps == "on" and settings.device == "auto" and len(machine.gpu.gpus) > 1:
        # Ray decides which GPU an engine gets, and it has not yet.
        _refuse_summons_without_plugin(settings)
        device, why_device = "cuda", "device: the GPU of the first rollout engine, which summons the sidecar"
    memory, why_memory = _decide_memory(settings, device, machine)
    if mps == "on" and memory is None:
        memory = DEFAULT_POOL
        why_memory = f"memory: {format_size(memory)}, the default on a shared GPU; it never changes during the run"
    utilization, why_join = _decide_join(settings, device, mps, memory, machine)
    shm = settings.ring_slots * settings.ring_slot + CHANNEL_OVERHEAD
    _check_shm(settings, shm, machine)
    why_shm = f"shared memory: {format_size(shm)} for each operator, {format_size(machine.shm_free)} free in /dev/shm"
    reasons = (*(line for line in (why_device, why_mps, why_join, why_memory, why_shm) if line), *advise(config))
    return Plan(device, mps, memory, shm, len(machine.gpu.gpus), reasons, utilization)


def _decide_device(settings: Settings, machine: Machine) -> tuple[str, str]:
    gpus = machine.gpu.gpus
    wish = settings.device
    if wish == "cpu":
        return "cpu", "device: cpu, as you asked"
    if wish == "auto" and not gpus:
        return "cpu", f"device: cpu, since there is no GPU here: {machine.gpu.why_none()}"
    if wish == "auto":
        # Ties go to the last GPU: Ray gives the first ones to the engines.
        best = max(gpus, key=lambda gpu: (gpu.free, gpu.index))
        return f"cuda:{best.index}", f"device: cuda:{best.index} ({best.name}), the GPU with most free memory"
    index = int(wish.removeprefix("cuda:"))
    if index >= len(gpus):
        there = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in gpus)
        raise PlacementError(
            f"device: {wish} is not on this machine: "
            + (f"it has {there}" if gpus else f"it has no GPU, {machine.gpu.why_none()}"),
            "name a GPU that is there" if gpus else "use device: auto or device: cpu",
        )
    return wish, f"device: {wish} ({gpus[index].name}), as you asked"


def _decide_mps(config: TrinityConfig, device: str, machine: Machine) -> tuple[str, str]:
    wish = config.settings.mps
    if wish == "off":
        return "off", "mps: off, as you asked"
    if not machine.gpu.gpus:
        obstacle = f"there is no GPU here: {machine.gpu.why_none()}"
    elif config.engine_type in _NO_VLLM:
        obstacle = f"{_NO_VLLM[config.engine_type]}: there is no vLLM engine to share a GPU with"
    elif device == "cpu":
        obstacle = "the sidecar trains on the CPU"
    else:
        obstacle = why_no_mps(device, machine, config.settings.join)
    if not obstacle:
        return "on", "mps: on, the GPU is shared with the rollout"
    if wish == "on":
        raise PlacementError(f"mps: on is not possible: {obstacle}", "use mps: auto or mps: off")
    return "off", f"mps: off, since {obstacle}"


def why_no_mps(device: str, machine: Machine, join: str = "plugin") -> str:
    """Why this GPU cannot be shared through MPS; "" when nothing speaks against it."""
    about = [
        (name, found)
        for name, found in machine.mps_problems
        if name == device or not (name.startswith("cuda:") or (name == PLUGINS_VARIABLE and join == "env"))
    ]
    return "; ".join(f"{name}: {found}" for name, found in about)


def _refuse_summons_without_plugin(settings: Settings) -> None:
    if settings.join == "env":
        raise PlacementError(
            "device: auto waits until a rollout engine says on which GPU it is; with join: env no engine does",
            "name the GPU that Ray gives to the rollout engine (device: cuda:<n>, see where it runs with nvidia-smi), "
            "or use join: plugin",
        )


def _decide_join(
    settings: Settings, device: str, mps: str, memory: int | None, machine: Machine
) -> tuple[float | None, str]:
    if mps == "off" or settings.join == "plugin":
        return None, ""
    gpu = _gpu_of(device, machine)
    # All engines of the file: which of them gets this GPU is for Ray to decide.
    share = plan_for_any_engine(gpu.total, gpu.total - gpu.free, memory or DEFAULT_POOL).utilization[0]
    return share, f"join: env, as you asked: every engine gets at most gpu_memory_utilization {share:.3f}"


def _decide_memory(settings: Settings, device: str, machine: Machine) -> tuple[int | None, str]:
    if settings.memory is None and settings.memory_fraction is None:
        return None, ""
    if device == "cpu":
        where, total, free = "this machine", machine.memory_total, machine.memory_free
    else:
        gpu = _gpu_of(device, machine)
        where, total, free = f"{device} ({gpu.name})", gpu.total, gpu.free
    if settings.memory is not None:
        key, wish = "memory", settings.memory
    else:
        key, wish = "memory_fraction", int((settings.memory_fraction or 0.0) * total)
    if wish > free:
        raise PlacementError(
            f"{key} asks for {format_size(wish)}, but {where} has {format_size(free)} free of {format_size(total)}",
            f"ask for at most {_largest(free, total, key)}",
        )
    # Nothing on the CPU holds a process to a size; the sidecar compares its replay buffer with what it finds.
    limit = ": on the CPU a wish, not a limit" if device == "cpu" else ""
    return wish, f"memory: {format_size(wish)} of {format_size(free)} free on {where}{limit}"


def _largest(free: int, total: int, key: str) -> str:
    # Rounded down, since the number is there to be pasted.
    if key == "memory_fraction":
        return f"memory_fraction: {int(free / total * 100) / 100}"
    return f"memory: {free // 2**20}MiB"


def _gpu_of(device: str, machine: Machine) -> Gpu:
    return machine.gpu.gpus[int(device.removeprefix("cuda:")) if ":" in device else 0]


def _check_shm(settings: Settings, need: int, machine: Machine) -> None:
    if need <= machine.shm_free:
        return
    fits = max(machine.shm_free - CHANNEL_OVERHEAD, 0) // settings.ring_slots
    raise PlacementError(
        f"/dev/shm has {format_size(machine.shm_free)} free of {format_size(machine.shm_total)}, and ring_slots: "
        f"{settings.ring_slots} of ring_slot: {format_size(settings.ring_slot)} need {format_size(need)}",
        f"lower ring_slot (at most {fits // 2**20}MiB with these slots) or ring_slots, or give the machine more: "
        "docker run --shm-size, or mount -o remount,size=... /dev/shm",
    )

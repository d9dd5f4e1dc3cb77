"""The engine itself: on which GPUs it is, with how much memory it starts, and when it is up."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pynvml

from mps_trainer.mps.summons import EngineSession

# Module and class whose constructor returns once the engine has measured memory and is up.
_ENGINES = (("vllm.v1.engine.async_llm", "AsyncLLM"), ("vllm.v1.engine.llm_engine", "LLMEngine"))


def visible_gpus(cuda_visible_devices: str | None) -> tuple[str, ...]:
    """UUIDs of the GPUs that a process with this variable sees; no CUDA context is made.

    Ordinals are read as NVML's, which are Ray's; CUDA's agree with them unless the machine mixes GPU models.
    """
    words = None if cuda_visible_devices is None else [w.strip() for w in cuda_visible_devices.split(",") if w.strip()]
    if words is not None and not any(word.isdigit() for word in words):
        return tuple(words)
    pynvml.nvmlInit()
    try:
        count = pynvml.nvmlDeviceGetCount()
        words = [str(i) for i in range(count)] if words is None else words
        return tuple(_uuid(word) for word in words if not word.isdigit() or int(word) < count)
    finally:
        pynvml.nvmlShutdown()


def own_gpus(visible: tuple[str, ...], vllm_config: Any, engine_index: int) -> tuple[tuple[str, ...], bool]:
    """Those of the visible GPUs that one engine is on, and whether it is on all of them.

    vLLM gives local rank r of a data parallel group, whose processes may all see every GPU, the r-th lot of as many
    GPUs as an engine has workers. Where Ray places the workers, or a rank is on another machine, nobody can say here.

    Args:
        engine_index: as a stat logger gets it: the rank in the data parallel group.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    workers = getattr(parallel, "world_size", None)
    if parallel is None or workers is None:
        return visible, len(visible) == 1
    if len(visible) <= workers:
        return visible, bool(visible)
    backends = (getattr(parallel, name, None) for name in ("distributed_executor_backend", "data_parallel_backend"))
    rank = _local_rank(parallel, engine_index)
    own = visible[rank * workers : (rank + 1) * workers] if rank is not None else ()
    if len(own) < workers or "ray" in backends:
        return visible, False
    return own, True


def _local_rank(parallel: Any, engine_index: int) -> int | None:
    if getattr(parallel, "data_parallel_size", 1) <= 1:
        return 0
    local = getattr(parallel, "data_parallel_rank_local", None)
    if local is not None:
        return int(local)
    # One front end for several ranks, its own first.
    first = getattr(parallel, "data_parallel_index", None)
    rank = engine_index - int(parallel.data_parallel_rank if first is None else first)
    return rank if 0 <= rank < parallel.data_parallel_size_local else None


def follow_engine(session: EngineSession, utilization: float | None) -> None:
    """Lower the memory share of the engine that this process builds, and report when it is up."""
    # By name, since vLLM is no dependency of ours; it is what is calling us.
    EngineArgs = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    original = EngineArgs.create_engine_config
    wishes: list[float] = []

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        wishes.append(self.gpu_memory_utilization)
        # Asked again it holds the lowered number, which is nobody's wish.
        wished = max(wishes)
        # The smaller one: calling it again, or a user who asks for less, lowers nothing twice.
        if utilization is not None:
            self.gpu_memory_utilization = min(self.gpu_memory_utilization, utilization)
        session.tell("config", wished=wished, utilization=self.gpu_memory_utilization)
        _report_when_up(session)
        return original(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def _report_when_up(session: EngineSession) -> None:
    for module_name, class_name in _ENGINES:
        engine = getattr(sys.modules.get(module_name), class_name, None)
        if engine is not None and not hasattr(engine.__init__, "__wrapped__"):
            engine.__init__ = _reporting(engine.__init__, session)


def _reporting(build: Callable[..., None], session: EngineSession) -> Callable[..., None]:
    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            build(self, *args, **kwargs)
        except BaseException as error:
            session.tell("failed", error=f"{type(error).__name__}: {error}")
            session.close()
            raise
        session.tell("ready")
        session.close()

    return __init__


def _uuid(word: str) -> str:
    if not word.isdigit():
        return word
    found = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(word)))
    return found.decode() if isinstance(found, bytes) else str(found)

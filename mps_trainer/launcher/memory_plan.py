"""Who gets which bytes of a shared GPU: a plan on paper, before anything starts.

    total = others + MPS server + sidecar (context, pool, slack) + engines (their shares) + head-room + rest

vLLM sizes itself from the total: with `gpu_memory_utilization` u it wants u * total free at its start, and takes more
beside that share. The plan gives the sidecar what it needs and lowers u until the sum fits; it never raises u.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mps_trainer.config import format_size
from mps_trainer.errors import PlacementError

MIB, GIB = 2**20, 2**30
# Measured on an H200 with driver 580 and rounded up (docs/results/gpu_beside_vllm.md).
MPS_SERVER = 128 * MIB
CONTEXT = 640 * MIB
# For kernels that CUDA loads later. A small classifier takes 140 MiB, a LoRA of a 0.5 B decoder 158 MiB and still more
# with sequences of new lengths (docs/results/gpu_reward_model.md); one that finds no room ends the sidecar.
SLACK = 512 * MIB
# What an engine takes beside its share: its context, CUDA graphs, NCCL, what libraries keep.
ENGINE_EXTRA = 3 * GIB
# A reservation below this is no use: PyTorch's small segments and one step of anything.
SMALLEST_POOL = 256 * MIB
_STEP = 0.001
# The most that an engine could ask for: what the plan gives is a cap, and the engine takes the smaller number.
_HIGHEST_UTILIZATION = 0.99


@dataclass(frozen=True)
class EngineWish:
    """An engine that will be on this GPU.

    Attributes:
        name: for the table, such as "rollout engine".
        utilization: the user's gpu_memory_utilization.
        needs: bytes below which it cannot work: its weights on this GPU and some KV cache.
        tensor_parallel: GPUs that it spans.
        sync_buffer: bytes of Trinity's weight synchronisation that it receives into, beside its share.
    """

    name: str
    utilization: float
    needs: int = 0
    tensor_parallel: int = 1
    sync_buffer: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """The resolved plan; sizes in bytes.

    Attributes:
        limit: of the sidecar's process, its context included (the MPS limit).
        pool: what its tensors may take.
        utilization: one for each engine, in the order of the wishes; never above the wish.
        rows: (what, bytes) of the whole GPU, for the table.
        warnings: sentences for people.
    """

    total: int
    limit: int
    pool: int
    utilization: tuple[float, ...]
    rows: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...] = ()

    def table(self) -> list[tuple[str, str, str]]:
        """(what, size, share of the GPU) for printing; the rows add up to the GPU."""
        return [(what, format_size(size), f"{100 * size / self.total:.1f} %") for what, size in self.rows]


def plan_memory(
    total: int,
    used: int,
    engines: Sequence[EngineWish],
    *,
    dry_step: int = 0,
    wish: int | None = None,
    mps: bool = True,
) -> MemoryPlan:
    """Divide a GPU.

    Args:
        total, used: bytes of the GPU, and of that what others hold now.
        engines: those that will start on this GPU.
        dry_step: what the task's worst-case step took: weights, gradients, optimizer, activations; 0 if unknown.
        wish: the user's `memory`, the pool; None takes the dry step and a quarter more.
        mps: whether the sidecar shares through MPS; without it there is no server and no limit.

    Raises:
        PlacementError: the wish is too small for the step, or does not fit; the message has the largest that does.
    """
    pool = _pool(dry_step, wish)
    server = MPS_SERVER if mps else 0
    overhead = CONTEXT + SLACK
    extra = sum(ENGINE_EXTRA + engine.sync_buffer for engine in engines)
    free = total - used - server - overhead - extra
    largest = _largest_pool(total, free, engines)
    if pool > largest:
        raise _does_not_fit(pool, largest, total, used, engines)
    shares = _lower([engine.utilization for engine in engines], (free - pool) / total)
    engine_rows = tuple((engine.name, int(share * total)) for engine, share in zip(engines, shares, strict=True))
    rows = (
        ("used by others now", used),
        ("MPS server", server),
        ("sidecar: CUDA context and slack", overhead),
        ("sidecar: pool (weights, gradients, optimizer, activations)", pool),
        *engine_rows,
        ("engines beside their share (context, CUDA graphs, NCCL, weight sync)", extra),
    )
    rest = total - sum(size for _, size in rows)
    return MemoryPlan(
        total, pool + overhead, pool, tuple(shares), (*rows, ("unused", rest)), tuple(_warnings(engines, shares))
    )


def plan_for_any_engine(total: int, used: int, pool: int) -> MemoryPlan:
    """The plan before it is known what an engine asks for; `utilization[0]` is the most that engines may have."""
    return plan_memory(total, used, [EngineWish("engine", _HIGHEST_UTILIZATION)], wish=pool)


def _pool(dry_step: int, wish: int | None) -> int:
    if wish is None:
        pool = max(SMALLEST_POOL, dry_step + dry_step // 4)
    else:
        pool = wish
        smallest = max(SMALLEST_POOL, dry_step)
        if wish < smallest:
            raise PlacementError(
                f"memory: {format_size(wish)} is too little: the task's worst-case step takes {format_size(dry_step)}",
                f"set memory to at least {-(-smallest // MIB)}MiB, or lower batch_size or the columns' maxima",
            )
    return pool // (2 * MIB) * 2 * MIB


def _lower(wishes: Sequence[float], budget: float) -> list[float]:
    # Engines on one GPU each want their share of the total; what is too much is taken from all alike.
    factor = min(1.0, budget / sum(wishes)) if wishes else 1.0
    # Rounded down, so that the sum stays within the budget.
    return [wish if factor == 1.0 else math.floor(wish * factor / _STEP) * _STEP for wish in wishes]


def _largest_pool(total: int, free: int, engines: Sequence[EngineWish]) -> int:
    # All engines are lowered by one factor, so the neediest of them says how far.
    factor = max((engine.needs / (engine.utilization * total) for engine in engines), default=0.0)
    if factor > 1.0:
        return 0
    shares = sum(engine.utilization * factor + _STEP for engine in engines)
    return int(free - shares * total)


def _does_not_fit(pool: int, largest: int, total: int, used: int, engines: Sequence[EngineWish]) -> PlacementError:
    needs = ", ".join(f"{engine.name} needs {format_size(engine.needs)}" for engine in engines)
    found = (
        f"the sidecar's {format_size(pool)} do not fit on a GPU of {format_size(total)}, of which {format_size(used)} "
        f"are used{'; ' + needs if needs else ''}, and each engine takes more beside its share"
    )
    if largest < SMALLEST_POOL:
        return PlacementError(found, "there is no room for a sidecar: use another GPU, or device: cpu")
    return PlacementError(found, f"set memory to at most {largest // MIB}MiB")


def _warnings(engines: Sequence[EngineWish], shares: Sequence[float]) -> list[str]:
    found = []
    for engine, share in zip(engines, shares, strict=True):
        if share < engine.utilization:
            found.append(
                f"{engine.name}: gpu_memory_utilization {engine.utilization:g} becomes {share:.3f} on this GPU; its KV "
                "cache shrinks accordingly"
            )
        if engine.tensor_parallel > 1:
            found.append(
                f"{engine.name} spans {engine.tensor_parallel} GPUs: an illegal memory access in the sidecar would "
                "take the whole engine down, on every one of them"
            )
    return found

"""How many operations a step launches. Beside a busy engine that number is the time of a step, not the work in it.

A kernel of a sidecar waits for the engine's kernels, and for itself to end before the next is launched: on an H200
0.14 ms each beside a 7B engine that generates, 0.25 ms or more beside one that computes prompts
(`docs/results/gpu_reward_model.md`, `gpu_stream_priority.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Make, name or look at tensors, and launch nothing.
_FREE = frozenset(
    {
        "view", "transpose", "slice", "unsqueeze", "expand", "t", "detach", "select", "alias", "permute", "squeeze",
        "_unsafe_view", "split", "as_strided", "empty", "empty_like", "empty_strided", "new_empty", "unbind",
        "lift_fresh", "is_same_size", "split_with_sizes", "reshape", "_reshape_alias", "narrow", "diagonal", "unfold",
    }
)  # fmt: skip
BESIDE_ENGINE_MS = 0.14


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: int = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.operations += function.__name__.split(".")[0] not in _FREE
        return function(*args, **(kwargs or {}))


def count_operations(call: Callable[[], object]) -> int:
    """The operations of PyTorch that `call` launches, views left out: about the kernels that a GPU would be given.

    Fused optimizers and foreach operations count once, as what they are; on the CPU AdamW launches about ten for each
    parameter.
    """
    count = _Count()
    with torch.autograd.set_multithreading_enabled(False), count:
        call()
    return count.operations

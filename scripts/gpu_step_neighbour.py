"""For `gpu_step_shapes.py`: the neighbour that a training step is measured beside, and how fast it is meanwhile.

A stand-in of normal priority that decodes or computes prompts or rests, as its switch says; or a real vLLM engine,
whose finished rounds are read from its folder. Made as vLLM's kernels are: a decoding step is one CUDA graph of the
products of 28 layers of the 7B shape for 256 sequences, a pass over their KV cache each, and the choice of a token,
waited for; prompts are 8192 x 8192 products, eight in the queue.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from gpu_lab import Counter

SETTINGS = ("nobody", "decode", "prompts")
ENGINE_SETTING = "engine"
#: Sequences, hidden, inner, qkv, vocabulary, layers, KV elements of a sequence, width of a prompt's product.
LARGE = (256, 3584, 18944, 4608, 152064, 28, 262144, 8192)
TINY = (2, 16, 32, 48, 64, 2, 64, 32)
#: Of which the layers' weights are; their turn makes each layer read them from memory anew.
DISTINCT_LAYERS = 4
IN_QUEUE = {"decode": 1, "prompts": 8}
ALONE_S, SWITCH_S, LEAST_PIECES = 0.25, 30.0, 3


class Switch(Counter):
    """A counter of finished pieces of work, when the last was finished, and what the neighbour shall do."""

    def done(self) -> None:
        """A piece is finished now."""
        self._set(0, self.value + 1)
        self._set(1, time.monotonic_ns())

    def look(self) -> tuple[int, int]:
        """Pieces so far, and nanoseconds of the last one's end: windows between ends know no half pieces."""
        while True:
            value, at = self.value, self._get(1)
            if value == self.value:
                return value, at

    @property
    def setting(self) -> str:
        return SETTINGS[self._get(3)]

    @setting.setter
    def setting(self, name: str) -> None:
        self._set(3, SETTINGS.index(name))


def serve(path: str, device: str) -> None:
    """The stand-in: works as its switch says, until that or its owner ends."""
    import torch

    switch, owner, never = Switch(Path(path)), os.getppid(), threading.Event()
    sizes = LARGE if device.startswith("cuda") else TINY
    work = {"decode": decoding(torch.device(device), sizes), "prompts": prompting(torch.device(device), sizes[-1])}
    queued: deque[Any] = deque()
    switch.done()
    while not switch.stopping and os.getppid() == owner:
        setting = switch.setting
        if setting not in work:
            while queued:
                queued.popleft().synchronize()
            never.wait(0.002)
            continue
        work[setting]()
        if device.startswith("cuda"):
            queued.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            queued[-1].record()
            while len(queued) >= IN_QUEUE[setting]:
                queued.popleft().synchronize()
        else:
            never.wait(0.002)
        switch.done()
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def decoding(device: Any, sizes: tuple[int, ...]) -> Callable[[], object]:
    """A call is one decoding step."""
    import torch
    from torch.nn import functional

    rows, hidden, inner, qkv, vocabulary, layers, kv_size, _ = sizes

    def weight(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.02

    weights = [
        (weight(hidden, qkv), weight(hidden, hidden), weight(hidden, 2 * inner), weight(inner, hidden))
        for _ in range(DISTINCT_LAYERS)
    ]
    head, start, cache = weight(hidden, vocabulary), weight(rows, hidden), weight(rows, kv_size)

    def step() -> Any:
        x = start
        for layer in range(layers):
            to_qkv, out, up, down = weights[layer % DISTINCT_LAYERS]
            normal = functional.layer_norm(x, (hidden,))
            attended = (normal @ to_qkv)[:, :hidden] + cache.sum(1, keepdim=True)
            x = x + attended @ out
            both = functional.layer_norm(x, (hidden,)) @ up
            x = x + (functional.silu(both[:, :inner]) * both[:, inner:]) @ down
        return (x @ head).float().argmax(1)

    with torch.no_grad():
        if device.type != "cuda":
            return torch.no_grad()(step)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Kept, so that its memory stays the graph's own.
            token = step()

    def replay(kept: Any = token) -> None:
        graph.replay()

    return replay


def prompting(device: Any, width: int) -> Callable[[], object]:
    """A call is one large product."""
    import torch

    a = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    return lambda: a @ a


class StandIn:
    """The client's view of `serve`. Rates are pieces of work per second."""

    def __init__(self, path: Path, settings: tuple[str, ...]) -> None:
        self._switch, self.settings = Switch(path), settings
        self._from = (0, 0)

    def enter(self, setting: str) -> None:
        """RuntimeError when it does not begin to work."""
        before = self._switch.value
        self._switch.setting = setting
        if setting != "nobody" and not self._switch.wait_for(before + LEAST_PIECES, SWITCH_S):
            raise RuntimeError(f"the neighbour does not {setting}: it may have died")

    def alone(self, setting: str) -> float | None:
        """Its speed while we do nothing."""
        if setting == "nobody":
            return None
        since = self.begin()
        threading.Event().wait(ALONE_S)
        if not self._switch.wait_for(self._from[0] + LEAST_PIECES, SWITCH_S):
            raise RuntimeError(f"the neighbour does not {setting} any more: it may have died")
        return self.rate(since)

    def begin(self) -> float:
        """A measurement begins; what `rate` is to be given."""
        self._from = self._switch.look()
        return time.monotonic()

    def enough(self, since: float) -> bool:
        """Whether a measurement that began then may end, as far as the neighbour is concerned."""
        return self._switch.setting == "nobody" or self._switch.value >= self._from[0] + LEAST_PIECES

    def rate(self, since: float) -> float | None:
        """Its speed since then."""
        (before, begin), (now, end) = self._from, self._switch.look()
        return (now - before) / (end - begin) * 1e9 if end > begin else 0.0


class EngineRounds:
    """The same view of a real engine (`gpu_engine.py`). Rates are tokens per second of whole rounds."""

    settings = (ENGINE_SETTING,)
    LEAST = 2

    def __init__(self, folder: Path) -> None:
        self._path = folder / "rounds.jsonl"
        self._alone: float | None = None

    def enter(self, setting: str) -> None:
        """It works all the time."""

    def alone(self, setting: str) -> float | None:
        """Its speed while we do nothing; measured once in each client."""
        if setting != ENGINE_SETTING:
            return None
        if self._alone is None:
            since, never = time.monotonic(), threading.Event()
            while not self.enough(since):
                if time.monotonic() > since + 60:
                    raise RuntimeError("the engine has done no round in 60 s")
                never.wait(0.05)
            self._alone = self.rate(since)
        return self._alone

    def begin(self) -> float:
        return time.monotonic()

    def enough(self, since: float) -> bool:
        return len(self._rounds(since)) >= self.LEAST

    def rate(self, since: float) -> float | None:
        rates = [r["tokens"] / (r["end"] - r["begin"]) for r in self._rounds(since)]
        return median(rates) if rates else None

    def _rounds(self, since: float) -> list[dict[str, Any]]:
        # The last line may be half written.
        lines = self._path.read_text().split("\n")[:-1] if self._path.exists() else []
        return [r for r in map(json.loads, lines) if r["begin"] >= since]

"""The random states that a task's code may draw from: torch's, numpy's global one and Python's own.

The replay buffer's generator is not among them: it belongs to the buffer and is saved with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_WORDS = 624


def seed_everything(seed: int) -> None:
    """Give all of them the run's seed."""
    torch.manual_seed(seed)
    # numpy's global generator takes 32 bits.
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """All states as tensors by name; the device's too when it is a GPU."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    words = numpy_state["state"]
    _, python_words, python_gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*words["key"].tolist(), words["pos"], numpy_state["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
        "python": torch.tensor(python_words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if python_gauss is None else [python_gauss], dtype=torch.float64),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_state(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(states["torch"])
    words = states["numpy"].tolist()
    gauss = float(states["numpy_gauss"].item())
    np.random.set_state(("MT19937", np.array(words[:_WORDS], np.uint32), words[_WORDS], words[_WORDS + 1], gauss))
    python_gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), python_gauss[0] if python_gauss else None))
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """On the CPU: afterwards all of them go on as if nothing had been drawn.

    Also in a process of others, where numpy's global generator may be of any kind.
    """
    numpy_state, python_state = np.random.get_state(legacy=False), random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)

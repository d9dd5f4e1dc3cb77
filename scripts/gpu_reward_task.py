"""For scripts/gpu_reward_model.py: the task `reward_model` that notes its memory, a base of random weights, rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_lab import DEVICE
from gpu_task import MemoryNotes
from torch import Tensor, nn

from mps_trainer import TaskBatch
from mps_trainer.tasks.reward_model import RewardModel

#: Qwen2.5-0.5B; a smaller one is for trying the script out where there is no GPU.
SHAPES = {
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
RUNS = 8


class NotedRewardModel(RewardModel):
    """`reward_model`, with a line about the device's memory once a second."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self._memory = MemoryNotes()

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        if DEVICE != "cpu":
            self._memory.note()
        return super().loss(model, batch)


def write_base(folder: Path, shape: str) -> int:
    """A causal language model with random weights in bfloat16, as a checkpoint folder; its parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    # The pad is an id of its own, as in Qwen2.5: its embedding is zeros, which no text should hold.
    pad = SHAPES[shape]["vocab_size"] - 1
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=32768, tie_word_embeddings=True, pad_token_id=pad)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def rows(shape: str, size: int, max_tokens: int) -> Callable[[], dict[str, Any]]:
    """`size` experiences at a time, runs of a task together: lengths from a quarter of the maximum to all of it."""
    rng = np.random.default_rng(0)
    vocabulary = int(SHAPES[shape]["vocab_size"])
    sent = [0]

    def make() -> dict[str, Any]:
        reward = rng.random(size, np.float32)
        lengths = rng.integers(max(1, max_tokens // 4), max_tokens + 1, size)
        tokens = [rng.integers(0, vocabulary - 1, length, np.int32) for length in lengths]
        first, sent[0] = sent[0], sent[0] + size
        groups = [f"t{(first + i) // RUNS}" for i in range(size)]
        return {"group": groups, "reward": reward, "outcome": reward, "tokens": tokens}

    return make

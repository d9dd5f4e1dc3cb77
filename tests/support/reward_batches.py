"""A tiny decoder in a folder, and experiences whose reward follows from their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mps_trainer.columns import IDENTITY_COLUMNS, Column, PackedBatch
from mps_trainer.transport import decode_batch, encode_batch

VOCABULARY = 32
LONGEST = 16
RUNS = 8
COLUMNS = (
    *IDENTITY_COLUMNS,
    Column(name="tokens", source="tokens", dtype="int32", shape=(None,), maximum=1024),
    Column(name="outcome", source="reward"),
)


def write_decoder(folder: Path, seed: int = 0, **options: Any) -> Path:
    """A Qwen2 of two layers with random weights, saved as `save_pretrained` does."""
    transformers = __import__("transformers")
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    kind = options.get("kind", "Qwen2ForCausalLM")
    config.num_labels = options.get("num_labels", 1)
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


def token_rows(rng: np.random.Generator, size: int, first: int = 0) -> dict[str, Any]:
    """Reward 1 where three of four ids are from the lower half, 0 where one is; runs of a task stand together."""
    reward = rng.integers(0, 2, size).astype(np.float32)
    tokens = []
    for good in reward:
        low = rng.random(rng.integers(8, LONGEST + 1)) < (0.75 if good else 0.25)
        tokens.append((rng.integers(1, VOCABULARY // 2, len(low)) + ~low * (VOCABULARY // 2)).astype(np.int32))
    return {
        "eid": [f"e{first + i}" for i in range(size)],
        "group": [f"t{(first + i) // RUNS}" for i in range(size)],
        "reward": reward,
        "outcome": reward,
        "tokens": tokens,
    }


def packed(rows: dict[str, Any]) -> PackedBatch:
    return decode_batch(encode_batch(rows, COLUMNS), COLUMNS)


def batch(size: int, seed: int = 0) -> PackedBatch:
    return packed(token_rows(np.random.default_rng(seed), size))

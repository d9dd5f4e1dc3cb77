"""The writer's process of `gpu_intake.py`: records as fast as there is room, each different, with its own checksums."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mps_trainer.columns import IDENTITY_COLUMNS, Column
from mps_trainer.transport import OperatorChannel, RingSettings

ROWS = 256
# One batch as the transport's benchmark has it (8.4 MB), and one at which launching a copy no longer shows.
WIDTHS = {"8.4 MB": 8192, "67 MB": 65536}
TOKENS = 64
PATTERNS = 5  # prime to the number of slots
SLOTS = 3
LIMIT_S = 55.0


def columns(width: int) -> tuple[Column, ...]:
    return (
        Column(name="feature", source="info.feature", dtype="int32", shape=(width,)),
        *IDENTITY_COLUMNS,
        Column(name="number", source="info.number", dtype="int64"),
        Column(name="feature_sum", source="info.feature_sum", dtype="int64"),
        Column(name="tokens", source="response_tokens", dtype="int32", shape=(None,), maximum=2 * TOKENS),
        Column(name="token_sum", source="info.token_sum", dtype="int64"),
    )


def write(run_id: str, width: int, stop: str) -> dict[str, Any]:
    """The operator's process: no CUDA, no torch."""
    import numpy as np

    patterns = []
    for seed in range(PATTERNS):
        rng = np.random.default_rng(seed)
        feature = rng.integers(-(2**31), 2**31, (ROWS, width), np.int32)
        tokens = [rng.integers(0, 2**31, k, np.int32) for k in rng.integers(0, 2 * TOKENS + 1, ROWS)]
        patterns.append(
            {
                "feature": feature,
                "group": ["g"] * ROWS,
                "reward": rng.random(ROWS, np.float32),
                "feature_sum": feature.sum(1, dtype=np.int64),
                "tokens": tokens,
                "token_sum": np.array([row.sum(dtype=np.int64) for row in tokens]),
            }
        )
    # Twice a row's bytes for the small columns: more than enough.
    ring = RingSettings(num_slots=SLOTS, slot_bytes=ROWS * (4 * width + 2048) + 2**20)
    deadline = time.monotonic() + LIMIT_S
    sent = number = 0
    with OperatorChannel.create(run_id, columns(width), ring, backpressure="block", block_timeout_s=0.5) as channel:
        while not Path(stop).exists() and time.monotonic() < deadline:
            rows = {
                **patterns[number % PATTERNS],
                "eid": [f"{number}/{i}" for i in range(ROWS)],
                "number": np.full(ROWS, number, np.int64),
            }
            sent += channel.send(rows, request_id=number, want_scores=False).parts_sent
            number += 1
    return {"records sent": sent}

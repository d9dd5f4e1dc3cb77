"""Made-up sessions and machines for the benchmark's tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from mps_trainer.bench.arms import Here
from mps_trainer.mps.checks import Surroundings
from mps_trainer.mps.nvml import GpuFacts, NvmlFacts

GIB = 2**30
EVERYTHING = Here(gpus=2, no_mps="", vllm=True, fastapi=True, pace=True)


def gpu(index: int, used: int = 600 * 2**20) -> GpuFacts:
    return GpuFacts(
        index=index, uuid=f"GPU-0000000{index}", name="NVIDIA H200", total=140 * GIB, used=used,
        compute_mode="default", mig=False,
    )  # fmt: skip


def mocked_surroundings(template: Surroundings, gpus: int) -> Surroundings:
    return dataclasses.replace(template, nvml=NvmlFacts(tuple(gpu(i) for i in range(gpus)), "580.159.04"))


def window(arm: str, number: int, *, seconds: float, steps: int = 0, **more: Any) -> dict[str, Any]:
    """A window of one batch of 100 tokens that took `seconds`, and half a second of gap."""
    batch = {
        "batch": number, "seconds": seconds, "tokens": 100, "wanted_tokens": 100, "digest": f"d{number}",
        "comparable": True, "not_finite": 0, "token_ms_p50": 10.0 * seconds, "token_ms_p99": 20.0 * seconds,
    }  # fmt: skip
    memory = {"resident": GIB, "gpu": 0}
    return {
        "arm": arm, "load": "gap 30 %", "round": number, "seconds": seconds + 0.5, "steps": steps,
        "cpu_s": {"engine": seconds, "trainer": 0.1, "feed": 0.0},
        "memory_bytes": {"engine": memory, "trainer": memory}, "batches": [{**batch, **more.pop("batch", {})}], **more,
    }  # fmt: skip


def session(windows: list[dict[str, Any]], alone: list[float]) -> dict[str, Any]:
    """A session of task A; `alone`: the trainer's steps per second without a rollout, by round."""
    rounds = [{"arm": "sidecar-cpu", "round": i, "seconds": 1.0, "steps": rate} for i, rate in enumerate(alone)]
    return {
        "task": "A", "windows": windows, "alone": rounds, "cut": "", "failed": "", "not_started": {},
        "rounds": len(alone),
        "closing": [{"what": "all there", "seconds": [1.01]}, {"what": "trainers ended", "seconds": [1.0]}],
    }  # fmt: skip

"""The two engines: the tiny one as it is, vLLM's driver with a mocked vLLM."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mps_trainer.bench.engine import BatchResult
from mps_trainer.bench.tiny_engine import TinyEngine
from mps_trainer.bench.vllm_engine import VllmEngine, model_config, needed_bytes

SPEC = {"width": 16, "layers": 1, "vocabulary": 50}


def test_the_tiny_engine_gives_each_rollout_its_length_and_the_same_tokens_again() -> None:
    engine = TinyEngine(SPEC)
    batch = {"seed": 3, "requests": [(0.0, 4, 9), (0.0, 2, 3), (0.0, 5, 1)]}
    first, other, again = engine.run(batch), engine.run({**batch, "seed": 4}), engine.run(batch)
    assert first["tokens"] == 13
    # The batch shrinks as responses end: a long tail is what a real engine has too.
    assert first["step_rows"] == [3, 2, 2, 1, 1, 1, 1, 1, 1]
    assert first["digest"] == again["digest"] != other["digest"]
    assert first["not_finite"] == 0
    assert BatchResult(**first).seconds > 0


def test_the_tiny_engine_waits_for_rollouts_that_arrive_later() -> None:
    found = TinyEngine(SPEC).run({"seed": 0, "requests": [(0.0, 3, 2), (0.05, 3, 4)]})
    assert found["tokens"] == 6
    assert found["end"] - found["begin"] >= 0.05


def test_weights_that_are_broken_are_seen() -> None:
    engine = TinyEngine(SPEC)
    engine._head.weight.data[:] = 1e38
    engine._head.bias.data[:] = 1e38
    engine._embedding.weight.data[:] = math.inf
    with pytest.raises(RuntimeError):
        engine.run({"seed": 0, "requests": [(0.0, 3, 2)]})


def test_a_token_counts_with_the_time_of_its_step() -> None:
    result = BatchResult(0.0, 1.0, 11, "", 0, (1.0, 100.0, 2.0), (9, 1, 1))
    assert result.token_ms(0.5) == 1.0
    assert result.token_ms(0.99) == 100.0


class MockedVllm:
    """`vllm` as far as the driver calls it: requests get one token in each step, every second step is empty."""

    __version__ = "0.0"

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.running: dict[str, int] = {}
        self.steps = 0
        cache = SimpleNamespace(gpu_memory_utilization=0.4, num_gpu_blocks=10, block_size=16)
        self.llm_engine = SimpleNamespace(
            add_request=self._add, step=self._step, vllm_config=SimpleNamespace(cache_config=cache)
        )
        self.logprob = -1.0

    def LLM(self, model: str, **options: Any) -> MockedVllm:
        self.made = {"model": model, **options}
        return self

    SamplingParams = staticmethod(lambda **options: SimpleNamespace(**options))

    def _add(self, name: str, prompt: Any, params: Any) -> None:
        assert prompt["prompt_token_ids"]
        assert params.ignore_eos
        assert name not in self.running
        self.running[name] = params.max_tokens

    def _step(self) -> list[Any]:
        self.steps += 1
        if self.steps % 2:
            return []
        found = []
        for name in list(self.running):
            self.running[name] -= 1
            answer = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=self.logprob)}])
            found.append(SimpleNamespace(outputs=[answer], finished=not self.running[name]))
            if not self.running[name]:
                del self.running[name]
        return found


@pytest.fixture
def mocked(monkeypatch: pytest.MonkeyPatch) -> MockedVllm:
    vllm = MockedVllm()
    monkeypatch.setitem(sys.modules, "vllm", vllm)  # type: ignore[arg-type]
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)  # type: ignore[arg-type]
    return vllm


def vllm_engine(folder: Path) -> VllmEngine:
    return VllmEngine({"shape": "7B", "utilization": 0.41, "longest": 1152, "sequences": 256, "folder": str(folder)})


def test_a_batch_with_a_mocked_vllm(mocked: MockedVllm, tmp_path: Path) -> None:
    engine = vllm_engine(tmp_path)
    assert mocked.made["gpu_memory_utilization"] == 0.41
    assert mocked.made["kv_cache_memory_bytes"] > 256 * 1152 * 28 * 2 * 512 * 2
    assert json.loads((tmp_path / "model" / "config.json").read_text())["hidden_size"] == 3584
    found = engine.run({"seed": 1, "requests": [(0.0, 4, 5), (0.0, 4, 2)]})
    assert (found["tokens"], found["step_rows"], found["not_finite"]) == (7, [2, 2, 1, 1, 1], 0)
    assert BatchResult(**found).token_ms(0.5) >= 0
    assert found["digest"] == engine.run({"seed": 1, "requests": [(0.0, 4, 1)]})["digest"]
    assert engine.facts()["KV blocks"] == 10


def test_logprobs_that_are_no_numbers_are_counted_with_a_mocked_vllm(mocked: MockedVllm, tmp_path: Path) -> None:
    engine = vllm_engine(tmp_path)
    mocked.logprob = math.nan
    assert engine.run({"seed": 1, "requests": [(0.0, 4, 5)]})["not_finite"] == 5 + 32


def test_the_7b_shape_has_the_size_of_a_7b_model() -> None:
    assert needed_bytes("7B", 0) == pytest.approx(15.2e9, rel=0.02)
    assert needed_bytes("7B", 1000) - needed_bytes("7B", 0) == 1000 * 28 * 2 * 512 * 2
    assert model_config("7B", 9000)["max_position_embeddings"] == 9000

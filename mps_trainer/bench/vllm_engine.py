"""A real vLLM engine with the shape of Qwen2.5 and random weights, stepped by hand so that each token's time is seen.

vLLM is no dependency of this package: it is imported in the engine's own process, by name.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mps_trainer.vllm_plugin import stat_logger

#: hidden, inner, layers, heads, KV heads, vocabulary, tied embeddings
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
_PROBE_TOKENS = 32
_BLOCK_TOKENS = 16


def model_config(shape: str, longest: int) -> dict[str, Any]:
    """The `config.json` of a model with this shape."""
    hidden, inner, layers, heads, kv_heads, vocabulary, tied = SHAPES[shape]
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "max_position_embeddings": max(4096, longest),
        "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def needed_bytes(shape: str, tokens: int) -> int:
    """Bytes below which the engine cannot hold its weights and `tokens` tokens of KV cache, in bf16."""
    hidden, inner, layers, heads, kv_heads, vocabulary, tied = SHAPES[shape]
    kv = hidden // heads * kv_heads
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
    weights = 2 * (layers * layer + (1 if tied else 2) * vocabulary * hidden)
    return weights + tokens * layers * 2 * kv * 2


def kv_bytes(shape: str, sequences: int, longest: int) -> int:
    """Bytes of a KV cache in which every sequence has room to its end, in whole blocks, and a little more."""
    tokens = sequences * (longest + 2 * _BLOCK_TOKENS)
    return int(1.05 * (needed_bytes(shape, tokens) - needed_bytes(shape, 0)))


class VllmEngine:
    """The engine in its process.

    Args:
        spec: shape, utilization, longest (tokens of prompt and response), sequences, folder (for `config.json`).
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._vllm = importlib.import_module("vllm")
        kinds = importlib.import_module("vllm.sampling_params")
        self._delta = kinds.RequestOutputKind.DELTA
        model = Path(spec["folder"]) / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(model_config(spec["shape"], spec["longest"])))
        self._vocabulary = SHAPES[spec["shape"]][5]
        self._llm = self._vllm.LLM(
            str(model), skip_tokenizer_init=True, load_format="dummy", gpu_memory_utilization=spec["utilization"],
            max_model_len=spec["longest"], max_num_seqs=spec["sequences"], enable_prefix_caching=False,
            # What it logs per step is part of what a pace costs, so it is on in every arm or in none.
            disable_log_stats=not spec.get("statistics", False),
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            # Not measured by vLLM: engines start side by side, and each would take the other's memory for its own.
            kv_cache_memory_bytes=kv_bytes(spec["shape"], spec["sequences"], spec["longest"]),
        )  # fmt: skip
        if spec.get("statistics", False):
            # vLLM loads stat loggers for its asynchronous engine only. Without a paced run there is none to add.
            stat_logger.attach(self._llm.llm_engine)
        self._asked = 0

    def facts(self) -> dict[str, Any]:
        """What it is, and how much of the GPU it got."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return {
            "engine": f"vLLM {self._vllm.__version__}", "utilization": cache.gpu_memory_utilization,
            "KV blocks": cache.num_gpu_blocks, "block tokens": cache.block_size,
            "pipe directory": os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""),
        }  # fmt: skip

    def run(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Generate a batch: as `engine.BatchResult`. The digest is that of one greedy sequence, alone.

        Sampled tokens depend on which rollouts happen to share a kernel, so they are not compared.
        """
        rng = np.random.default_rng(int(batch["seed"]))
        waiting = [
            (arrival, rng.integers(3, self._vocabulary - 8, prompt).tolist(), response)
            for arrival, prompt, response in sorted(batch["requests"])
        ]
        probe = waiting[0][1]
        found = self._generate(waiting, seed=int(batch["seed"]))
        alone = self._generate([(0.0, probe, _PROBE_TOKENS)], seed=None)
        digest = hashlib.sha256(repr(alone["ids"]).encode()).hexdigest()[:16]
        bad = found["not_finite"] + alone["not_finite"]
        return {**{k: v for k, v in found.items() if k != "ids"}, "digest": digest, "not_finite": bad}

    def _generate(self, waiting: list[tuple[float, list[int], int]], seed: int | None) -> dict[str, Any]:
        engine = self._llm.llm_engine
        begin = since = time.monotonic()
        ids: list[int] = []
        tokens = bad = running = 0
        step_ms, step_rows = [], []
        while waiting or running:
            started = time.monotonic()
            while waiting and begin + waiting[0][0] <= started:
                _, prompt, length = waiting.pop(0)
                self._add(engine, prompt, length, seed)
                running += 1
            if not running:
                time.sleep(max(0.0, begin + waiting[0][0] - time.monotonic()))
                since = time.monotonic()
                continue
            rows = 0
            for output in engine.step():
                answer = output.outputs[0]
                rows += len(answer.token_ids)
                bad += sum(not math.isfinite(e.logprob) for step in answer.logprobs or [] for e in step.values())
                if seed is None:
                    ids += answer.token_ids
                running -= int(output.finished)
            tokens += rows
            if rows:
                # Since the last tokens: a scheduler that works ahead returns empty steps in between.
                now = time.monotonic()
                step_ms.append(round(1e3 * (now - since), 3))
                step_rows.append(rows)
                since = now
        ended = time.monotonic()
        return {
            "begin": begin, "end": ended, "tokens": tokens, "not_finite": bad, "ids": ids,
            "step_ms": step_ms, "step_rows": step_rows,
        }  # fmt: skip

    def _add(self, engine: Any, prompt: list[int], length: int, seed: int | None) -> None:
        self._asked += 1
        params = self._vllm.SamplingParams(
            temperature=0.0 if seed is None else 1.0, max_tokens=length, ignore_eos=True, detokenize=False,
            logprobs=1, output_kind=self._delta,
        )  # fmt: skip
        engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, params)

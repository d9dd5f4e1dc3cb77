"""A real vLLM engine in a process of its own, which generates without a pause and checks what comes out.

    python scripts/gpu_engine.py FOLDER UTILIZATION TOKENS      # is the engine; started by `Engine`

The model has the shape of Qwen2.5-7B (or fewer layers) with random weights. In FOLDER it writes `ready.json` once and
then `rounds.jsonl`: a round is 256 sampled sequences of which every logprob is checked, and one greedy sequence, alone,
whose tokens must be the same each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KV_HEADS, HEAD_SIZE, BLOCK_TOKENS = 4, 128, 16
SEQUENCES, PROMPT_TOKENS, PROBE_TOKENS = 256, 128, 32
#: "1": the engine says how busy it is, as one of a paced run does.
STATISTICS_VARIABLE = "GPU_ENGINE_STATISTICS"
Round = dict[str, Any]


def kv_block_bytes(layers: int) -> int:
    """Bytes of one KV block of this model in bf16."""
    return BLOCK_TOKENS * layers * 2 * KV_HEADS * HEAD_SIZE * 2


def weight_bytes(layers: int) -> int:
    """Bytes of the weights in bf16, biases and norms left out."""
    hidden, inner, vocabulary = 3584, 18944, 152064
    kv = KV_HEADS * HEAD_SIZE
    return 2 * (layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner) + 2 * vocabulary * hidden)


def serve(folder: Path, utilization: float, max_tokens: int) -> None:
    """The engine's process."""
    import numpy as np
    from vllm import LLM, SamplingParams

    from mps_trainer.vllm_plugin import stat_logger

    started, owner = time.monotonic(), os.getppid()
    statistics = os.environ.get(STATISTICS_VARIABLE) == "1"
    llm = LLM(
        str(folder / "model"), skip_tokenizer_init=True, load_format="dummy", gpu_memory_utilization=utilization,
        max_model_len=1024, max_num_seqs=SEQUENCES, enable_prefix_caching=False,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, disable_log_stats=not statistics,
    )  # fmt: skip
    if statistics:
        # vLLM loads stat loggers for its asynchronous engine only, which is Trinity's.
        stat_logger.attach(llm.llm_engine)
    config = llm.llm_engine.vllm_config
    facts = {
        "seconds to ready": time.monotonic() - started, "utilization": config.cache_config.gpu_memory_utilization,
        "KV blocks": config.cache_config.num_gpu_blocks, "block tokens": config.cache_config.block_size,
        "pipe directory": os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""),
    }  # fmt: skip
    _replace(folder / "ready.json", facts)
    rows = np.random.default_rng(0).integers(3, 150000, (SEQUENCES, PROMPT_TOKENS)).tolist()
    prompts = [{"prompt_token_ids": row} for row in rows]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=PROBE_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
    with (folder / "rounds.jsonl").open("a") as log:
        # It ends with the script, too.
        while not (folder / "stop").exists() and os.getppid() == owner:
            begin = time.monotonic()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            end = time.monotonic()
            probe = llm.generate(prompts[:1], greedy, use_tqdm=False)
            tokens = list(probe[0].outputs[0].token_ids)
            found = {
                "begin": begin, "end": end, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
                "not finite": sum(_not_finite(output) for output in [*outputs, *probe]),
                "probe": hashlib.sha256(repr(tokens).encode()).hexdigest()[:16], "probe tokens": len(tokens),
                "probe end": time.monotonic(),
            }  # fmt: skip
            log.write(json.dumps(found) + "\n")
            log.flush()


def _not_finite(output: Any) -> int:
    import numpy as np

    values = [entry.logprob for step in output.outputs[0].logprobs for entry in step.values()]
    return int((~np.isfinite(values)).sum())


def _replace(path: Path, facts: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(facts))
    temporary.replace(path)


class Engine:
    """The script's end: starts the process, reads its rounds, ends it."""

    def __init__(self, folder: Path, utilization: float, env: dict[str, str], *, layers: int, max_tokens: int) -> None:
        self.folder = folder
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps({**QWEN_7B, "num_hidden_layers": layers}))
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self.started = time.monotonic()
        with (folder / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(folder), str(utilization), str(max_tokens)],
                env={**env, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """What it says of itself once it generates."""
        path = self.folder / "ready.json"
        self._wait(lambda: path.exists() and len(self.rounds()) > 0, timeout_s, "ready")
        facts: dict[str, Any] = json.loads(path.read_text())
        return {**facts, "seconds to the first round": time.monotonic() - self.started}

    def rounds(self, since: float = 0.0, until: float = float("inf")) -> list[Round]:
        """Rounds that began after `since` and ended, probe included, before `until` (time.monotonic)."""
        path = self.folder / "rounds.jsonl"
        # The last line may be half written.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [r for r in map(json.loads, lines) if r["begin"] >= since and r["probe end"] <= until]

    def wait_rounds(self, since: float, count: int, timeout_s: float) -> list[Round]:
        """At least `count` whole rounds after `since`; RuntimeError when the engine died or is silent."""
        self._wait(lambda: len(self.rounds(since)) >= count, timeout_s, f"done with {count} rounds")
        return self.rounds(since)

    def log_tail(self, characters: int = 3000) -> str:
        return (self.folder / "engine.log").read_text(errors="replace")[-characters:]

    def close(self, timeout_s: float = 30.0) -> int:
        """Ask it to end after its round; SIGTERM and SIGKILL for it and its children when it does not."""
        (self.folder / "stop").touch()
        for number, limit in ((0, timeout_s), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            # Its session is its own, and its leader is not reaped yet, so the group is ours.
            if number and self.process.poll() is None:
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(limit)
        return -1

    def _wait(self, condition: Any, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not self.is_alive:
                raise RuntimeError(f"the engine has ended ({self.process.poll()}):\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine is not {what} after {timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.05)


def rate(rounds: list[Round]) -> dict[str, float]:
    """Generated tokens per second of each round: median and range."""
    rates = [r["tokens"] / (r["end"] - r["begin"]) for r in rounds] or [0.0]
    return {"median": median(rates), "min": min(rates), "max": max(rates), "rounds": len(rounds)}


def flaws(rounds: list[Round], probe: str) -> dict[str, int]:
    """Logprobs that are not finite, and greedy sequences that are not `probe`."""
    return {
        "not finite": sum(r["not finite"] for r in rounds),
        "greedy differs": sum(r["probe"] != probe for r in rounds),
    }


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))

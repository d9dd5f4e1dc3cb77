"""A tiny rollout engine on one CPU core, which stands in for vLLM where there is no GPU.

A recurrent language model with random weights, sampled in batches that shrink as responses end. It shows the method
and nothing of vLLM's speed. The same seeds give the same tokens whenever all rollouts of a batch arrive at once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class TinyEngine:
    """Prefill and decode of a GRU language model.

    Args:
        spec: width, layers, vocabulary.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        width, layers, self._vocabulary = int(spec["width"]), int(spec["layers"]), int(spec["vocabulary"])
        self._embedding = nn.Embedding(self._vocabulary, width)
        self._body = nn.GRU(width, width, layers, batch_first=True)
        self._head = nn.Linear(width, self._vocabulary)

    def facts(self) -> dict[str, Any]:
        """What it is."""
        modules = (self._embedding, self._body, self._head)
        parameters = sum(p.numel() for module in modules for p in module.parameters())
        return {"engine": "tiny CPU engine (GRU), stands in for vLLM", "parameters": parameters}

    @torch.inference_mode()
    def run(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Generate a batch: as `engine.BatchResult`."""
        self._generator = torch.Generator().manual_seed(int(batch["seed"]))
        waiting = sorted(enumerate(batch["requests"]), key=lambda item: item[1][0])
        begin = time.monotonic()
        rows: list[_Row] = []
        done: list[_Row] = []
        states, last = torch.empty(0), torch.empty(0)
        steps: list[tuple[float, int]] = []
        finite = True
        while waiting or rows:
            started = time.monotonic()
            arrived = [item for item in waiting if begin + item[1][0] <= started]
            if not rows and not arrived:
                time.sleep(max(0.0, begin + waiting[0][1][0] - started))
                continue
            waiting = waiting[len(arrived) :]
            new = [_Row(index, request[2]) for index, request in arrived]
            if new:
                fresh_states, fresh_last = self._prefill([request[1] for _, request in arrived])
                states = torch.cat([states, fresh_states], 1) if rows else fresh_states
                last = torch.cat([last, fresh_last]) if rows else fresh_last
                rows += new
            logits = self._head(last)
            finite = finite and bool(torch.isfinite(logits).all())
            tokens = torch.multinomial(torch.softmax(logits, 1), 1, generator=self._generator)
            for row, token in zip(rows, tokens[:, 0].tolist(), strict=True):
                row.tokens.append(token)
            steps.append((time.monotonic() - started, len(rows)))
            going = torch.tensor([len(row.tokens) < row.length for row in rows])
            done += [row for row in rows if len(row.tokens) >= row.length]
            rows = [row for row in rows if len(row.tokens) < row.length]
            if rows:
                hidden, states = self._body(self._embedding(tokens[going]), states[:, going].contiguous())
                last = hidden[:, -1]
        ended = time.monotonic()
        done.sort(key=lambda row: row.index)
        digest = hashlib.sha256(repr([row.tokens for row in done]).encode()).hexdigest()[:16]
        return {
            "begin": begin, "end": ended, "tokens": sum(len(row.tokens) for row in done), "digest": digest,
            "not_finite": int(not finite), "step_ms": [round(1e3 * s, 3) for s, _ in steps],
            "step_rows": [n for _, n in steps],
        }  # fmt: skip

    def _prefill(self, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """States and last outputs after prompts of these lengths; shorter ones are filled from the left."""
        prompts = torch.randint(0, self._vocabulary, (len(lengths), max(lengths)), generator=self._generator)
        hidden, states = self._body(self._embedding(prompts))
        return states, hidden[:, -1]


class _Row:
    def __init__(self, index: int, length: int) -> None:
        self.index, self.length = index, length
        self.tokens: list[int] = []

"""Sampling from a small causal language model on one CPU core, shared by both stand-in engines."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache


class Response(NamedTuple):
    """One sampled response: token ids, their log-probabilities at the sampling temperature, same length."""

    tokens: list[int]
    logprobs: list[float]


class RequestChance:
    """A random generator for each request, seeded by its prompt and by how often that prompt has come.

    Workflow runners race; so the same run gives the same responses whatever the order of the requests.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._asked: Counter[tuple[int, ...]] = Counter()

    def generator(self, prompt: list[int]) -> torch.Generator:
        """The generator of the next request with these prompt tokens."""
        key = tuple(prompt)
        self._asked[key] += 1
        # All goes into 32 bits: the CPU generator ignores the others.
        seed = zlib.crc32(repr((self._seed, self._asked[key], key)).encode())
        return torch.Generator().manual_seed(seed)


def _next_logits(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Logits (n, vocabulary) of what follows tokens (n, length); `cache` holds all before and takes these in."""
    # By position: transformers renames this argument, from past_key_values to cache.
    return model(tokens, None, None, cache, use_cache=True).logits[:, -1]


@torch.no_grad()
def sample_responses(
    model: Any,
    prompt: list[int],
    num_responses: int,
    max_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> list[Response]:
    """Draw `num_responses` responses to one prompt (token ids), each ended by EOS or by `max_tokens`.

    transformers' own `generate` spends more time on its bookkeeping than on a model of this size.
    """
    end_id = model.config.eos_token_id
    cache = DynamicCache()
    logits = _next_logits(model, torch.tensor([prompt]), cache).expand(num_responses, -1)
    cache.batch_repeat_interleave(num_responses)
    open_rows = torch.ones(num_responses, dtype=torch.bool)
    tokens, logprobs, masks = [], [], []
    for _ in range(max_tokens):
        log_p = torch.log_softmax(logits.float() / max(temperature, 1e-5), dim=-1)
        token = torch.multinomial(log_p.exp(), 1, generator=generator)
        tokens.append(token)
        logprobs.append(log_p.gather(1, token))
        masks.append(open_rows.clone())
        open_rows &= token.squeeze(1) != end_id
        if not open_rows.any() or len(tokens) == max_tokens:
            break
        logits = _next_logits(model, token, cache)
    token_rows, logprob_rows = torch.cat(tokens, 1), torch.cat(logprobs, 1)
    lengths = torch.stack(masks, 1).sum(1).tolist()
    return [Response(token_rows[i, :n].tolist(), logprob_rows[i, :n].tolist()) for i, n in enumerate(lengths)]


@torch.no_grad()
def score_tokens(model: Any, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities, shape (len(tokens) - 1,), of every token but the first."""
    logits = model(torch.tensor([tokens[:-1]])).logits[0].float() / max(temperature, 1e-5)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)

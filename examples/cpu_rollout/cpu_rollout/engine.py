"""The rollout engine that Trinity's workflow runners talk to: a Ray actor with a transformers model on the CPU.

Trinity's `engine_type: external` makes no actor of its own, yet every WorkflowRunner looks one up by name. This
actor answers to that name. Chat template, prompt truncation and the conversion of messages are Trinity's own
(`BaseInferenceModel`); only the generation is ours.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trinity.common.experience import Experience
from trinity.common.models.model import BaseInferenceModel

from cpu_rollout.sampling import RequestChance, sample_responses, score_tokens


class CpuRolloutModel(BaseInferenceModel):
    """One engine. The same requests in the same order per prompt give the same responses, whatever runs beside."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model: Any = None
        self.model_version = 0
        self.chance = RequestChance(int(config.seed))
        self.generating = asyncio.Lock()

    async def _initialize_tokenizer(self) -> None:
        if self.tokenizer is None:
            self.tokenizer = AutoTokenizer.from_pretrained(self.config.model_path)

    async def prepare(self) -> None:
        torch.set_num_threads(1)
        await self._initialize_tokenizer()
        self.model = AutoModelForCausalLM.from_pretrained(self.config.model_path, dtype=torch.float32).eval()
        self._prepared = True

    async def chat(self, messages: list[dict[str, Any]], lora_request: Any = None, **options: Any) -> list[Experience]:
        """`options["n"]` experiences for one conversation, rewards not set."""
        return await self.generate(self.apply_chat_template(self.tokenizer, messages), **options)

    async def generate(self, prompt: str, lora_request: Any = None, **options: Any) -> list[Experience]:
        """`options["n"]` experiences for one prompt, rewards not set."""
        prompt_ids, fits = self._handle_prompt_truncation(prompt, **options)
        if not fits:
            return list(prompt_ids)  # Trinity has made the masked-out experiences itself
        max_tokens = int(options.get("max_tokens") or self.config.max_response_tokens)
        temperature = options.get("temperature")
        temperature = self.config.temperature if temperature is None else float(temperature)
        generator = self.chance.generator(prompt_ids)
        async with self.generating:
            responses = await asyncio.to_thread(
                sample_responses,
                self.model,
                prompt_ids,
                int(options.get("n") or 1),
                max_tokens,
                temperature,
                generator,
            )
        return [
            Experience(
                tokens=torch.tensor(prompt_ids + response.tokens, dtype=torch.int32),
                logprobs=torch.tensor(response.logprobs, dtype=torch.float32),
                prompt_length=len(prompt_ids),
                prompt_text=self.tokenizer.decode(prompt_ids),
                response_text=self.tokenizer.decode(response.tokens, skip_special_tokens=True),
            )
            for response in responses
        ]

    async def logprobs(
        self, token_ids: list[int], lora_request: Any = None, temperature: float | None = None
    ) -> torch.Tensor:
        """Log-probabilities, shape (len(token_ids) - 1,)."""
        async with self.generating:
            return await asyncio.to_thread(score_tokens, self.model, token_ids, temperature or 1.0)

    def get_model_version(self) -> int:
        return self.model_version

    async def sync_model_weights(self, model_version: int, method: Any, timeout: float = 1200) -> int:
        """The version counts on, the weights stay: mode explore has no trainer."""
        self.model_version = model_version
        return model_version

    async def get_message_token_len(self, messages: list[dict[str, Any]]) -> int:
        return len(self.tokenizer(self.apply_chat_template(self.tokenizer, messages))["input_ids"])

"""Not the tinker SDK: the calls of it that trinity-rft 0.6 makes, answered by a transformers model in this process.

With it the real Trainer takes real optimizer steps on a CPU in mode both. Weights travel through folders under
$TINKER_STAND_IN_DIR, so explorer and trainer may be different processes of one machine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cpu_rollout.sampling import RequestChance, sample_responses, score_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinker import types

LossFunction = Callable[[list[types.Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]


def _checkpoint(name: str) -> Path:
    return Path(os.environ["TINKER_STAND_IN_DIR"]) / name.replace("/", "_")


def _load(path: str) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


async def _answer(result: types.Result) -> types.Result:
    """The SDK returns futures; ours are done when they are made."""
    return result


class SamplingClient:
    """Samples from one checkpoint; as in the engine, chance depends on the prompt and how often it was asked."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.model = _load(path).eval()
        self.chance = RequestChance()
        self.lock = asyncio.Lock()

    def get_tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.path)

    async def sample_async(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: dict[str, Any],
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> types.SampleResponse:
        generator = self.chance.generator(prompt.tokens)
        async with self.lock:
            responses = await asyncio.to_thread(
                sample_responses,
                self.model,
                prompt.tokens,
                num_samples,
                int(sampling_params["max_tokens"]),
                float(sampling_params["temperature"]),
                generator,
            )
        end_id = self.model.config.eos_token_id
        return types.SampleResponse(
            [types.SampledSequence("stop" if r.tokens[-1] == end_id else "length", *r) for r in responses]
        )

    async def compute_logprobs_async(self, prompt: types.ModelInput) -> list[float]:
        async with self.lock:
            scores = await asyncio.to_thread(score_tokens, self.model, prompt.tokens)
        return [0.0, *scores.tolist()]


class TrainingClient:
    """Trains one model: all its weights, not the LoRA adapter that the service would train."""

    def __init__(self, path: str, optimizer_state: Path | None = None) -> None:
        self.base_path = path
        self.model = _load(path).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if optimizer_state is not None:
            self.optimizer.load_state_dict(torch.load(optimizer_state, weights_only=True))

    async def get_info_async(self) -> SimpleNamespace:
        return SimpleNamespace(model_id="stand-in")

    def _logprobs(self, datum: types.Datum) -> torch.Tensor:
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"])
        logits = self.model(torch.tensor([datum.model_input.tokens])).logits[0].float()
        return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)

    async def forward_backward_custom_async(self, batch: list[types.Datum], loss_fn: LossFunction) -> Any:
        loss, metrics = loss_fn(batch, [self._logprobs(datum) for datum in batch])
        loss.backward()
        return _answer(types.Result(metrics=metrics))

    async def optim_step_async(self, adam: types.AdamParams) -> Any:
        for group in self.optimizer.param_groups:
            group.update(lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), weight_decay=adam.weight_decay)
        limit = adam.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return _answer(types.Result(metrics={"actor/grad_norm": float(norm)}))

    def _save(self, name: str) -> Path:
        folder = _checkpoint(name)
        self.model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(self.base_path).save_pretrained(folder)
        return folder

    async def save_state_async(self, name: str) -> Any:
        folder = self._save(name)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        return _answer(types.Result(path=str(folder)))

    async def save_weights_for_sampler_async(self, name: str) -> Any:
        return _answer(types.Result(path=str(self._save(name))))


class RestClient:
    async def delete_checkpoint_async(self, model_id: str, name: str) -> None:
        shutil.rmtree(_checkpoint(name))


class ServiceClient:
    """The door to the others; there is no service behind it."""

    def __init__(self, base_url: str | None = None) -> None:
        pass

    def get_server_capabilities(self) -> SimpleNamespace:
        name = os.environ["CPU_ROLLOUT_MODEL"]
        return SimpleNamespace(supported_models=[SimpleNamespace(model_name=name)])

    def create_rest_client(self) -> RestClient:
        return RestClient()

    async def create_sampling_client_async(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        return await asyncio.to_thread(SamplingClient, model_path or base_model or "")

    async def create_lora_training_client_async(self, base_model: str, **lora: Any) -> TrainingClient:
        return await asyncio.to_thread(TrainingClient, base_model)

    async def create_training_client_from_state_with_optimizer_async(self, path: str) -> TrainingClient:
        return await asyncio.to_thread(TrainingClient, path, Path(path) / "optimizer.pt")

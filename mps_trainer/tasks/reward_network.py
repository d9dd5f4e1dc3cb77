"""The network of the task `reward_model`: a decoder from a Hugging Face folder with a scalar head on its last token.

    folder > AutoModelForSequenceClassification, one label > [LoRA adapters by peft] > RewardNetwork

What is trained is always float32: the steps of a small learning rate are lost in bfloat16's 8 bits. What is frozen
under LoRA may be bfloat16; then, and with `bfloat16` for all weights, the decoder computes in bfloat16 (autocast).

Shape legend: B experiences, L padded length, H hidden size.
"""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mps_trainer.errors import ConfigError
from mps_trainer.tasks.batch import Ragged
from mps_trainer.tasks.in_parts import in_parts

_EXTRA = "pip install -e '.[reward]' in the clone of mps-trainer"
#: Padded lengths are multiples of it: few different sizes keep PyTorch's allocator from fragmenting a fixed pool.
LENGTH_STEP = 64
_FINGERPRINT = "base_fingerprint"


@dataclass(frozen=True)
class NetworkSettings:
    """What the network is made of; see `RewardModel` for the meaning."""

    folder: Path
    max_tokens: int
    dtype: torch.dtype
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_targets: str | list[str]
    gradient_checkpointing: bool


class RewardNetwork(nn.Module):
    """Token ids -> (B,) float32 rewards, read at each row's last token.

    Its `state_dict` holds what is trained, and of the frozen weights a fingerprint: a checkpoint of a LoRA stays
    small, and is refused by another base.
    """

    base_fingerprint: Tensor
    compute: Tensor

    def __init__(self, network: Any, settings: NetworkSettings) -> None:
        super().__init__()
        self.network = network
        self.max_tokens = settings.max_tokens
        self.pad_id = network.config.pad_token_id or 0
        self.vocabulary = network.get_input_embeddings().num_embeddings
        self._frozen = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        # Not what peft keeps of the head as it was: a new one differs with the seed, and is never used.
        base = sorted(name for name in self._frozen if ".original_module." not in name)
        self.register_buffer(_FINGERPRINT, torch.tensor(_fingerprint(self, base)))
        # A tensor, so that `.float()` makes this a float32 network throughout, as a comparison with one needs.
        self.register_buffer("compute", torch.empty(0, dtype=settings.dtype), persistent=False)

    def forward(self, tokens: Tensor, mask: Tensor, last: Tensor) -> Tensor:
        """(B,) rewards of (B, L) token ids, padded on the right, with their mask and the place (B,) of the last one."""
        # Of a LoRA, the model that its adapters were put into.
        model = self.network.get_base_model() if self._frozen else self.network
        with self._autocast(tokens.device.type):
            hidden = model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        pooled = hidden[torch.arange(len(tokens), device=tokens.device), last]
        rewards: Tensor = model.score(pooled.to(torch.float32))
        return rewards.squeeze(-1)

    def rewards(self, tokens: Ragged, part_size: int) -> Tensor:
        """(B,) rewards of sequences, `part_size` at a time, so that memory does not grow with B.

        With gradients each part is computed a second time in the backward pass (`in_parts`). An empty sequence counts
        as one pad.
        """
        self._check_ids(tokens.values)
        lengths = tokens.lengths.clamp(min=1)
        # Rows of like length together need the least padding.
        order = torch.argsort(lengths, stable=True)
        longest = lengths[order].tolist()
        parts = []
        for start in range(0, len(order), part_size):
            rows = order[start : start + part_size]
            width = -(-longest[min(start + part_size, len(order)) - 1] // LENGTH_STEP) * LENGTH_STEP
            width = min(width, max(self.max_tokens, longest[-1]))
            parts.append(self._padded(tokens, rows, lengths[rows], width))
        return in_parts(self, parts)[torch.argsort(order)]

    def _padded(self, tokens: Ragged, rows: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        columns = torch.arange(width, device=rows.device)
        there = columns < tokens.lengths[rows].unsqueeze(1)
        values = tokens.values if len(tokens.values) else tokens.offsets.new_zeros(1)
        places = (tokens.offsets[rows].unsqueeze(1) + columns).clamp(max=len(values) - 1)
        padded = torch.where(there, values[places].long(), self.pad_id)
        return padded, (columns < lengths.unsqueeze(1)).long(), lengths - 1

    def _check_ids(self, values: Tensor) -> None:
        # On a GPU an index that is out of range breaks the context instead of raising.
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < self.vocabulary:
            raise ValueError(
                f"token ids from {int(values.min())} to {int(values.max())}, but the checkpoint's vocabulary has "
                f"{self.vocabulary}: it must have the tokenizer of the policy"
            )

    def _autocast(self, device: str) -> AbstractContextManager[object]:
        dtype = self.compute.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Without the frozen weights."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        for name in self._frozen:
            state.pop(name, None)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """What `state_dict` gave. RuntimeError when names differ, or when it was trained on another base."""
        differ = self.state_dict().keys() ^ state_dict.keys()
        if strict and differ:
            raise RuntimeError(f"it has other weights than this network: {', '.join(sorted(differ)[:4])}")
        found = state_dict.get(_FINGERPRINT)
        if found is not None and int(found) != int(self.base_fingerprint):
            raise RuntimeError("it was trained on another base model than the folder in task_args.checkpoint holds now")
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def build_network(settings: NetworkSettings) -> RewardNetwork:
    """The network on the CPU, new weights drawn from torch's generator. ConfigError when the folder cannot serve."""
    # Without LoRA every weight is trained, and so float32.
    model = _load(settings.folder, settings.dtype if settings.lora_rank else torch.float32)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and settings.max_tokens > positions:
        raise ConfigError(
            f"task_args.max_tokens is {settings.max_tokens}; the model in {settings.folder} has {positions} positions",
            f"use {positions} or less",
        )
    network = _with_lora(model, settings) if settings.lora_rank else model
    if settings.gradient_checkpointing:
        # Since transformers 5.24 it has another name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return RewardNetwork(network, settings)


def import_libraries(lora: bool) -> None:
    """Import what `build_network` needs. ConfigError names the extra that brings it."""
    _library("transformers")
    if lora:
        _library("peft")


def check_folder(checkpoint: str) -> Path:
    """The folder of a checkpoint, looked at without transformers. ConfigError says what is missing."""
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"task_args.checkpoint is {checkpoint!r}, and there is no such folder here",
            "name a local folder with a Hugging Face checkpoint: nothing is downloaded during a run; fetch a model of "
            "the hub before it (`hf download ID --local-dir FOLDER`)",
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"task_args.checkpoint: {folder} holds no config.json",
            "name the folder that `save_pretrained` wrote; of an adapter, merge it into its base first",
        )
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"task_args.checkpoint: {folder} holds no *.safetensors",
            "save it again with `save_pretrained`: pickled weights (.bin, .pt) are not read, they may hold code",
        )
    return folder


def _load(folder: Path, dtype: torch.dtype) -> Any:
    transformers = _library("transformers")
    with _quiet(transformers):
        try:
            model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder,
                num_labels=1,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"task_args.checkpoint: transformers cannot make a model with one label of {folder}: {error}",
                "name a decoder (Qwen2, Llama, Mistral, ...) that transformers knows without code of its own, or a "
                "reward model of one label",
            ) from error
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"task_args.checkpoint: {type(model).__name__} has no head `score` on the last token",
            "name a decoder (Qwen2, Llama, Mistral, ...): encoders such as BERT read their first token",
        )
    missing = sorted(set(info["missing_keys"]) - {"score.weight", "score.bias"})
    if missing:
        raise ConfigError(
            f"task_args.checkpoint: {folder} lacks {len(missing)} weights of a {type(model).__name__}, such as "
            f"{missing[0]}",
            "name a whole checkpoint; these would start from random numbers",
        )
    head.to(torch.float32)
    if "score.weight" in info["missing_keys"]:
        # As the reward models of Stiennon et al. (arXiv:2009.01325): rewards of order one.
        nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
    return model


def _with_lora(model: Any, settings: NetworkSettings) -> Any:
    peft = _library("peft")
    targets = settings.lora_targets
    config = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=["score"],
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(
            f"task_args.lora_targets is {targets!r}: {error}", "use all-linear, or names of the model's linear layers"
        ) from error


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"task reward_model needs {name}: {error}", _EXTRA) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the progress bar and the table of new weights: a head that is new is what we want."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _fingerprint(module: nn.Module, names: Sequence[str]) -> int:
    """A number that differs for other weights, of about 64 values of each."""
    found = 0
    for name in names:
        values = module.get_parameter(name).detach().flatten()
        sample = values[:: max(1, len(values) // 64)].float().numpy()
        found = zlib.crc32(sample.tobytes(), zlib.crc32(f"{name} {len(values)}".encode(), found))
    return found

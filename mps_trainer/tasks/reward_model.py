"""The built-in task `reward_model`: a language model with a scalar head learns the reward of a whole experience.

It starts from a Hugging Face checkpoint in a local folder: a causal language model (then the head is new) or a reward
model with one label. The reward r is read at the last token. The losses, for experience i with reward y:

    pairwise   -log sigmoid(r_i - r_j) + center (r_i + r_j)^2      over the pairs of runs of one task with y_i > y_j
    mse        (r_i - y_i)^2
    bce        -y_i log p_i - (1 - y_i) log(1 - p_i),  p = sigmoid(r), y brought into [0, 1]

The first is the model of Bradley and Terry (Biometrika 39, 1952), in the form of Christiano et al. (arXiv:1706.03741)
and Ouyang et al. (arXiv:2203.02155, equation 1: the mean over the pairs of a task, then over the tasks). A batch
without a pair has the loss 0 and is counted. The second term (Eisenstein et al., arXiv:2312.09244) holds the level of
r, of which pairs say nothing, near 0: it would wander, and with it what is added to a reward. Pairs need runs of one
task in one training batch: choose `batch_size` and `replay_capacity` so that they meet (a buffer of a few batches of
the explorer), or `pairs: batch`.

Adapters are LoRA (Hu et al., arXiv:2106.09685). What is trained is float32 and is all that checkpoints hold;
`scripts/export_reward_model.py` makes a folder for transformers or peft of it. Token ids are those of the policy, so
the checkpoint must have the policy's tokenizer. With `use: filter`, which drops the highest scores, ask for
`score: penalty` or `disagreement`. `metrics.jsonl` has under `task`: pairs, pair_accuracy (of the pairs before they are
trained on), steps_without_pair, tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from mps_trainer.columns import Column
from mps_trainer.errors import ConfigError
from mps_trainer.tasks.base import AuxiliaryTask
from mps_trainer.tasks.batch import TaskBatch
from mps_trainer.tasks.optimizers import adamw
from mps_trainer.tasks.reward_network import (
    NetworkSettings,
    RewardNetwork,
    build_network,
    check_folder,
    import_libraries,
)
from mps_trainer.tasks.reward_pairs import better, contradiction, group_mean, pair_loss, same_group

Loss = Literal["pairwise", "mse", "bce"]
Score = Literal["reward", "penalty", "disagreement"]
Pairs = Literal["group", "batch"]
Text = Literal["all", "response"]
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: Means of equal numbers differ from them in the last bits.
_EQUAL = 1e-6


class RewardModel(AuxiliaryTask):
    """A decoder with a scalar head, trained on pairs of runs or on the reward itself.

    Args:
        checkpoint: a local folder of a Hugging Face decoder, with *.safetensors; a reward model has one label.
        loss: pairwise, mse or bce (above).
        score: reward: r (bce: its sigmoid); penalty: -r; disagreement: how far outcome and model are apart: |y - r|
            (bce: of the sigmoid), for pairwise the probability that the experience's pairs are the other way round.
        pairs: which runs are compared: those of one task (group), or any two of the batch.
        min_gap: a pair's rewards differ by more than this.
        center: the weight of the second term of pairwise; 0 leaves it out.
        text: all: prompt and response; response: the response alone.
        max_tokens: of a longer sequence the last ones are read; the metric `cut_sequences` counts such.
        micro_batch_size: experiences that are in the model at a time. A larger batch takes more time, not memory.
        lora_rank: of the adapters; 0 trains all weights.
        lora_alpha, lora_dropout: the adapters' factor is alpha / rank.
        lora_targets: all-linear, or a list of names of linear layers.
        gradient_checkpointing: compute each layer again in the backward pass instead of keeping its activations.
        dtype: bfloat16 or float32: in which the decoder computes, and in which weights that are not trained are held.
        learning_rate: of AdamW; None for 1e-4 with LoRA and 1e-5 without.
        weight_decay: of AdamW.
    """

    def __init__(
        self,
        checkpoint: str,
        loss: Loss = "pairwise",
        score: Score = "reward",
        pairs: Pairs = "group",
        min_gap: float = 0.0,
        center: float = 0.01,
        text: Text = "all",
        max_tokens: int = 2048,
        micro_batch_size: int = 8,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        lora_targets: str | list[str] = "all-linear",
        gradient_checkpointing: bool = True,
        dtype: str = "bfloat16",
        learning_rate: float | None = None,
        weight_decay: float = 0.01,
    ) -> None:
        choices = {"loss": (loss, Loss), "score": (score, Score), "pairs": (pairs, Pairs), "text": (text, Text)}
        for key, (word, kind) in choices.items():
            _check_choice(key, word, get_args(kind))
        _check_choice("dtype", dtype, tuple(_DTYPES))
        sizes = {"max_tokens": max_tokens, "micro_batch_size": micro_batch_size, "lora_rank": lora_rank + 1}
        for key, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"task_args.{key} is {size!r}", "use a whole number that is large enough")
        if min_gap < 0 or center < 0 or not 0 <= lora_dropout < 1:
            raise ConfigError(
                f"task_args.min_gap is {min_gap!r}, center {center!r}, lora_dropout {lora_dropout!r}",
                "use numbers of at least 0, and a share from 0 to below 1",
            )
        self.loss_kind, self.score_kind = loss, score
        self.pairs, self.min_gap, self.center = pairs, min_gap, center
        self.text, self.max_tokens, self.micro_batch_size = text, max_tokens, micro_batch_size
        self.network = NetworkSettings(
            folder=check_folder(checkpoint),
            max_tokens=max_tokens,
            dtype=_DTYPES[dtype],
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            lora_targets=lora_targets,
            gradient_checkpointing=gradient_checkpointing,
        )
        self.learning_rate = learning_rate if learning_rate is not None else 1e-4 if lora_rank else 1e-5
        self.weight_decay = weight_decay
        self._counts = dict.fromkeys(("steps_without_pair", "pairs", "pairs_right", "tokens"), 0)

    def columns(self) -> Sequence[Column]:
        """The end of the token sequence, and the reward."""
        source = "tokens" if self.text == "all" else "response_tokens"
        return [
            Column(name="tokens", source=source, dtype="int32", shape=(None,), maximum=self.max_tokens, keep="last"),
            Column(name="outcome", source="reward"),
        ]

    def prepare(self) -> None:
        """Import transformers and, for LoRA, peft. ConfigError when one is missing."""
        import_libraries(self.network.lora_rank > 0)

    def build_model(self) -> nn.Module:
        """The network on the CPU. ConfigError when the folder holds no decoder of which a reward model can be made."""
        self.prepare()
        return build_network(self.network)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW on what is trained."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return adamw(trained, self.learning_rate, self.weight_decay)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """The loss above, a mean; its memory is that of `micro_batch_size` sequences."""
        rewards = self._rewards(model, batch)
        if model.training:
            self._counts["tokens"] += len(batch.ragged("tokens").values)
        if self.loss_kind == "mse":
            return mse_loss(rewards, batch["outcome"])
        if self.loss_kind == "bce":
            return binary_cross_entropy_with_logits(rewards, batch["outcome"].clamp(0, 1))
        comparable = self._comparable(batch)
        pairs = better(batch["outcome"], comparable, self.min_gap)
        if model.training:
            self._count_pairs(rewards, pairs)
        return pair_loss(rewards, pairs, comparable, self.center)

    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """(B,): the reward, its negative, or how far outcome and model are apart."""
        rewards = self._rewards(model, batch)
        if self.score_kind == "disagreement" and self.loss_kind == "pairwise":
            return contradiction(rewards, better(batch["outcome"], self._comparable(batch), self.min_gap))
        value = torch.sigmoid(rewards) if self.loss_kind == "bce" else rewards
        if self.score_kind == "disagreement":
            return (batch["outcome"] - value).abs()
        return -value if self.score_kind == "penalty" else value

    def predictions(self, model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """(B,) the reward, and (B,) whether the outcome was above the mean of what it is compared with.

        Pairs of one task say nothing about the level of its rewards, so there the mean of the task's is taken off.
        """
        rewards, comparable = self._rewards(model, batch), self._comparable(batch)
        came_true = batch["outcome"] > group_mean(batch["outcome"], comparable) + _EQUAL
        if self.loss_kind == "pairwise" and self.pairs == "group":
            rewards = rewards - group_mean(rewards, comparable)
        return rewards, came_true.float()

    def metrics(self) -> Mapping[str, float]:
        """Counts since the last call; `pair_accuracy` only where there were pairs."""
        counts = self._counts
        self._counts = dict.fromkeys(counts, 0)
        if self.loss_kind != "pairwise":
            return {"tokens": counts["tokens"]}
        right = counts.pop("pairs_right")
        return {**counts, "pair_accuracy": right / counts["pairs"]} if counts["pairs"] else counts

    def export(self, weights: Path, folder: Path) -> None:
        """Write the model of a checkpoint's `model.safetensors` for transformers or, with LoRA, an adapter for peft.

        Raises:
            ConfigError: the base folder cannot serve.
            RuntimeError: the weights are those of another network or of another base.
        """
        from safetensors.torch import load_file

        model = self.build_model()
        assert isinstance(model, RewardNetwork)
        model.load_state_dict(load_file(weights))
        model.network.save_pretrained(folder)

    def _rewards(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        assert isinstance(model, RewardNetwork)
        return model.rewards(batch.ragged("tokens"), self.micro_batch_size)

    def _comparable(self, batch: TaskBatch) -> Tensor:
        groups = batch.texts["group"] if self.pairs == "group" and self.loss_kind == "pairwise" else [""] * batch.size
        return same_group(groups, batch["outcome"].device)

    def _count_pairs(self, rewards: Tensor, pairs: Tensor) -> None:
        right = pairs & (rewards.detach().unsqueeze(1) > rewards.detach().unsqueeze(0))
        num_pairs, num_right = torch.stack([pairs.sum(), right.sum()]).tolist()
        self._counts["pairs"] += num_pairs
        self._counts["pairs_right"] += num_right
        self._counts["steps_without_pair"] += not num_pairs


def _check_choice(key: str, word: object, valid: Sequence[str]) -> None:
    if word not in valid:
        raise ConfigError(f"task_args.{key} is {word!r}", f"use {', '.join(valid[:-1])} or {valid[-1]}")

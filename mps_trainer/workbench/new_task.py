"""`mps-trainer new-task NAME`: a task that works, with comments that say what to change, and its test."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path

from mps_trainer.errors import ConfigError

_TASK = '''\
"""{title}: will this response earn more than the other runs of its task?

What to change stands behind CHANGE. Try it: mps-trainer check-task {module}:{title} --data experiences.jsonl
"""

import torch
from mps_trainer import AuxiliaryTask, Column, TaskBatch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits


class {title}(AuxiliaryTask):
    learning_rate = 1e-2

    # CHANGE: arguments come from `task_args` in the YAML.
    def __init__(self, num_buckets: int = 512, max_tokens: int = 4096) -> None:
        self.num_buckets, self.max_tokens = num_buckets, max_tokens

    # CHANGE: what the model needs; a vector of your workflow: source="info.hidden_state", shape=(3584,).
    def columns(self) -> list[Column]:
        return [
            Column(name="tokens", source="response_tokens", dtype="int32", shape=(None,), maximum=self.max_tokens),
            Column(name="group_mean", source="group.reward_mean"),
        ]

    # CHANGE: any nn.Module, made on the CPU.
    def build_model(self) -> nn.Module:
        return nn.EmbeddingBag(self.num_buckets, 1, mode="mean")

    def loss(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return binary_cross_entropy_with_logits(self.logits(model, batch), self.better(batch))

    # CHANGE: `use: filter` drops the highest scores; here: where reward and model disagree most.
    def score(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        return (self.better(batch) - torch.sigmoid(self.logits(model, batch))).abs()

    def predictions(self, model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        return self.logits(model, batch), self.better(batch)

    def logits(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        tokens = batch.ragged("tokens")
        return model(tokens.values.long() % self.num_buckets, tokens.offsets[:-1]).squeeze(-1)

    def better(self, batch: TaskBatch) -> Tensor:
        return (batch["reward"] > batch["group_mean"]).float()
'''

_TEST = '''\
"""{title} learns a rule that is known: responses with more even tokens than odd ones earn 1."""

import numpy as np
from mps_trainer.workbench import RecordedExperience, RecordedId, learn

from {module} import {title}


# CHANGE: make experiences that hold what your columns read, with a rule that your model can find.
def experience(batch: int, task: int, run: int, rng: np.random.Generator) -> RecordedExperience:
    tokens = rng.integers(0, 100, 36)
    reward = float((tokens[4:] % 2 == 0).mean() > 0.5)
    return RecordedExperience(eid=RecordedId(batch, task, run), tokens=tokens, prompt_length=4, reward=reward)


def test_it_learns() -> None:
    rng = np.random.default_rng(0)
    batches = [[experience(batch, i // 8, i % 8, rng) for i in range(64)] for batch in range(20)]
    learnt = learn({title}(), batches, steps=150)
    assert learnt.last_loss < learnt.first_loss
    assert learnt.auc is not None
    assert learnt.auc > 0.8, "on experiences that it was not trained on"
'''


def new_task(name: str, folder: Path) -> tuple[Path, Path, str]:
    """Write NAME.py and test_NAME.py; their paths and the class's name.

    ConfigError: the name cannot be a module's, or a file is there already; then nothing is written.
    """
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is no name for a module", "use letters, digits and _, such as outlier_filter")
    task, test = folder / f"{name}.py", folder / f"test_{name}.py"
    for path in (task, test):
        if path.exists():
            raise ConfigError(f"{path} exists", "choose another name or --folder; nothing was written")
    if _is_taken(name):
        raise ConfigError(f"{name!r} is a module of Python or of this environment already", "choose another name")
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_")) or name
    if title == name or keyword.iskeyword(title):
        title += "Task"
    if not title.isidentifier():
        title = f"Task{title}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in ((task, _TASK), (test, _TEST)):
            with path.open("x") as file:
                file.write(_wrapped(text, name, title))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", "choose another --folder") from None
    return task, test, title


def _wrapped(text: str, module: str, title: str) -> str:
    return text.replace("{module}", module).replace("{title}", title)


def _is_taken(name: str) -> bool:
    if name in sys.stdlib_module_names or name.startswith("__") or not name.strip("_"):
        return True
    return importlib.util.find_spec(name) is not None

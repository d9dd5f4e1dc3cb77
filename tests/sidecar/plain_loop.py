"""The reference: the same task trained in this process, with nothing of the sidecar but the replay buffer's draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mps_trainer.config import Settings
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.tasks import TaskBatch, load_task, wire_columns
from mps_trainer.transport import decode_batch, encode_batch


def train_plainly(settings: Settings, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    task = load_task(settings.task, settings.task_args)
    columns = wire_columns(task)
    torch.manual_seed(settings.seed)
    model = task.build_model()
    optimizer = task.optimizer(model)
    replay = ReplayBuffer(columns, settings.replay_capacity, settings.seed)
    model.train()
    for rows in batches:
        replay.add(decode_batch(encode_batch(rows, columns), columns))
        for _ in range(settings.steps_per_batch if len(replay) >= settings.min_experiences else 0):
            optimizer.zero_grad()
            task.loss(model, TaskBatch.from_packed(replay.sample(settings.batch_size))).backward()
            optimizer.step()
    return model.state_dict()


def newest_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = max((run_dir / "checkpoints").glob("step-*"), key=lambda p: int(p.name.removeprefix("step-")))
    return load_file(folder / "model.safetensors")


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)

#!/usr/bin/env python3
"""The model of a run with the task `reward_model`, as a folder for transformers or, of a LoRA, for peft.

    python scripts/export_reward_model.py RUN_FOLDER OUT [--step N]

RUN_FOLDER holds settings.json and checkpoints/ (`mps-trainer status` names it, or the link `latest` beside it). OUT is
written by `save_pretrained`; the checkpoint folder of the task_args must still be there. Exit status: 0 done, 1 not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mps_trainer.config import load_settings
from mps_trainer.errors import MpsTrainerError, RunError
from mps_trainer.sidecar.checkpoint import checkpoints
from mps_trainer.tasks import load_task
from mps_trainer.tasks.reward_model import RewardModel


def export(run_dir: Path, out: Path, step: int | None) -> Path:
    """Write `out`; the checkpoint that it was made of."""
    settings = load_settings(json.loads((run_dir / "settings.json").read_text()))
    task = load_task(settings.task, settings.task_args)
    if not isinstance(task, RewardModel):
        raise RunError(f"the run's task is {settings.task}", "this script is for reward_model")
    found = checkpoints(run_dir / "checkpoints")
    chosen = [path for path in found if step is None or path.name == f"step-{step}"]
    if not chosen:
        there = ", ".join(path.name for path in found) or "none"
        raise RunError(f"no such checkpoint in {run_dir / 'checkpoints'}", f"there is: {there}")
    if out.exists() and any(out.iterdir()):
        raise RunError(f"{out} is there and not empty", "name a new folder")
    task.export(chosen[0] / "model.safetensors", out)
    return chosen[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
    args = parser.parse_args()
    try:
        made_of = export(args.run_folder, args.out, args.step)
    except (MpsTrainerError, RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{args.out}: made of {made_of}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

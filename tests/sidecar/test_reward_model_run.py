"""`reward_model` in the real sidecar: the weights of a plain loop, small checkpoints, and what is exported of them."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import assert_same_weights, newest_weights, train_plainly
from reward_batches import LONGEST, token_rows, write_decoder

from mps_trainer.run.exit_codes import OK

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_weights_equal_a_plain_loop_and_can_be_exported(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    args = {
        "checkpoint": str(write_decoder(tmp_path / "decoder")), "max_tokens": LONGEST, "micro_batch_size": 6,
        "lora_rank": 2, "dtype": "float32", "learning_rate": 1e-2,
    }  # fmt: skip
    schedule = {"batch_size": 16, "steps_per_batch": 3, "replay_capacity": 40, "min_experiences": 8, "seed": 7}
    run = make_run(task="reward_model", task_args=args, **schedule)
    rng = np.random.default_rng(0)
    batches = [token_rows(rng, 24, first=24 * i) for i in range(3)]
    child, ready = run.start()
    assert ready == {"state": "ready"}, run.log()
    with run.channel() as channel:
        run.wait_for_attach(channel)
        for request, rows in enumerate(batches):
            channel.send(rows, request_id=request, want_scores=True)
            assert channel.receive_scores(request, timeout_s=90) is not None
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) == OK
    weights = newest_weights(run.run_dir)
    assert_same_weights(weights, train_plainly(run.settings, batches))
    assert all("lora_" in name or "score" in name for name in weights if name != "base_fingerprint")
    told = [line["task"] for line in run.metrics() if line["kind"] == "batch"]
    assert told[-1]["pairs"] > 0
    assert 0 <= told[-1]["pair_accuracy"] <= 1
    (run.run_dir / "settings.json").write_text(json.dumps(run.settings.dump()))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from export_reward_model import main

    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["export_reward_model.py", str(run.run_dir), str(out)])
    assert main() == 0
    assert capsys.readouterr().out == f"{out}: made of {run.run_dir / 'checkpoints' / 'step-9'}\n"
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(out, num_labels=1)
    head = weights["network.base_model.model.score.modules_to_save.default.weight"]
    assert torch.equal(loaded.base_model.model.score.weight, head)
    assert main() == 1, "a folder that is not empty stays as it is"
    monkeypatch.setattr(sys, "argv", ["export_reward_model.py", str(run.run_dir), str(out / "new"), "--step", "4"])
    assert main() == 1
    assert "there is: step-9" in capsys.readouterr().err

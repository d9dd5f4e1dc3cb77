"""`scripts/gpu_reward_model.py` from end to end on the CPU: all is real but the engine, MPS and the GPU's numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from script_on_the_cpu import script_on_the_cpu


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("peft")
    with script_on_the_cpu("gpu_reward_model", monkeypatch) as module:
        yield module


@pytest.mark.slow
def test_it_trains_idles_and_says_what_it_saw(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = (
        "--kinds lora --shape tiny --max-tokens 64 --batch-size 8 --micro-batch 3 --rounds 2 --arm-s 2 --memory 1GiB"
    )
    monkeypatch.setattr(sys, "argv", ["gpu_reward_model.py", *words.split(), "--budget-s", "280", "--out", str(out)])
    code = script.main()
    said = capsys.readouterr()
    found = json.loads(out.read_text())
    assert code == 0, said.out[-3000:] + said.err[-3000:]
    kind = found["kinds"]["lora"]
    busy, idle = (kind["comparison"][name]["sidecar/s"] for name in ("busy", "idle"))
    assert busy["experiences"]["min"] == pytest.approx(8 * busy["steps"]["min"])
    assert busy["tokens"]["min"] > 10 * busy["experiences"]["min"]
    assert idle["tokens"]["max"] == 0
    assert kind["start"]["worst step, ms"] >= 0
    assert kind["engine at the end"] == {"alive": True, "exit status": 0}


def test_both_kinds_make_a_task_and_fit_into_the_ring(script: Any, tmp_path: Path) -> None:
    from gpu_reward_task import NotedRewardModel, rows, write_base
    from ruamel.yaml import YAML

    from mps_trainer.config import load_settings
    from mps_trainer.tasks import wire_columns
    from mps_trainer.transport import decode_batch, encode_batch

    write_base(tmp_path / "base", "tiny")
    options = SimpleNamespace(max_tokens=1024, micro_batch=8, memory="24GiB", batch_size=32, keep_activations=False)
    for name, rank in (("lora", 16), ("full", 0)):
        path, args = script.write_config(tmp_path, name, options)
        block = YAML(typ="safe").load(path)["data_processor"]["experience_pipeline"]["operators"][0]["args"]
        settings = load_settings(block)
        assert settings.task_args == args
        task = NotedRewardModel(**args)
        assert task.network.lora_rank == rank
        made = rows("tiny", 32, 1024)()
        encoded = encode_batch({"eid": [str(i) for i in range(32)], **made}, wire_columns(task))
        assert len(encoded) < 2**20, "a record must fit into a slot"
        assert decode_batch(encoded, wire_columns(task)).num_rows == 32

"""`scripts/gpu_reward_model.py` from end to end on the CPU: all is real but the engine, MPS and the GPU's numbers."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


class StandInEngine:
    """Generates nothing, and says so five times a second."""

    def __init__(self, folder: Path, utilization: float, env: dict[str, str], **sizes: Any) -> None:
        assert "MPS_TRAINER_RUN" in env
        self.process = SimpleNamespace(pid=0)
        self._rounds: list[dict[str, Any]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._generate, daemon=True)
        self._thread.start()

    def _generate(self) -> None:
        begin = time.monotonic()
        while not self._done.wait(0.2):
            end = time.monotonic()
            self._rounds.append(
                {"begin": begin, "end": end, "probe end": end, "tokens": 100, "not finite": 0, "probe": "same"}
            )
            begin = end

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def rounds(self, since: float = 0.0) -> list[dict[str, Any]]:
        return [one for one in self._rounds if one["begin"] >= since]

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        self.wait_rounds(0.0, 1, timeout_s)
        return {"KV blocks": 0}

    def wait_rounds(self, since: float, count: int, timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        while len(self.rounds(since)) < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return self.rounds(since)

    def close(self) -> int:
        self._done.set()
        self._thread.join(90)
        return 0


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    # What the script itself sets for its children is put back as well.
    for name in ("MPS_TRAINER_STATE_DIR", "MPS_TRAINER_VENV", "PYTHONPATH", "GPU_TASK_COMMAND", "GPU_TASK_MEMORY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("GPU_LAB_DEVICE", "cpu")
    forget()
    import gpu_reward_model

    monkeypatch.setattr(gpu_reward_model, "Engine", StandInEngine)
    usual = signal.getsignal(signal.SIGTERM)
    yield gpu_reward_model
    signal.signal(signal.SIGTERM, usual)
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("gpu_")]:
        del sys.modules[name]


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

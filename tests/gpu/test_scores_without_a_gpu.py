"""`scripts/gpu_scores.py` from end to end on the CPU: all is real but the engine, MPS and the GPU's numbers."""

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
        self.is_alive = True
        self._began = time.monotonic()

    def rounds(self, since: float = 0.0) -> list[dict[str, Any]]:
        starts = [self._began + i / 5 for i in range(int((time.monotonic() - self._began) * 5))]
        return [
            {"begin": t, "end": t + 0.2, "probe end": t + 0.2, "tokens": 100, "not finite": 0, "probe": "same"}
            for t in starts
            if t >= since
        ]

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        self.wait_rounds(0.0, 1, timeout_s)
        return {"KV blocks": 0}

    def wait_rounds(self, since: float, count: int, timeout_s: float) -> list[dict[str, Any]]:
        never = threading.Event()
        deadline = time.monotonic() + timeout_s
        while len(self.rounds(since)) < count:
            assert time.monotonic() < deadline
            never.wait(0.05)
        return self.rounds(since)

    def log_tail(self, characters: int) -> str:
        return ""

    def close(self) -> int:
        return 0


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith(("gpu_", "bench_scores"))]:
        del sys.modules[name]


@pytest.mark.slow
def test_it_measures_scores_beside_a_stand_in_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    # What the script itself sets for its children is put back as well.
    for name in ("MPS_TRAINER_STATE_DIR", "MPS_TRAINER_VENV", "PYTHONPATH", "GPU_TASK_COMMAND", "GPU_TASK_MEMORY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GPU_LAB_DEVICE", "cpu")
    forget()
    import gpu_scores

    out = tmp_path / "found.json"
    monkeypatch.setattr(gpu_scores, "Engine", StandInEngine)
    # How long it takes here is no matter of this test.
    monkeypatch.setattr(gpu_scores, "TARGET_MS", 60_000)
    words = ["gpu_scores.py", "--tokens", "16", "--batches", "2", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    usual = signal.getsignal(signal.SIGTERM)
    try:
        code = gpu_scores.main()
    finally:
        signal.signal(signal.SIGTERM, usual)
        forget()
    found = json.loads(out.read_text())
    assert code == 0, (found["claims"], found["problems"], capsys.readouterr().out[-2000:])
    assert found["scores"]["batches"] == 4
    assert 0 < found["scores"]["p50, ms"] <= found["scores"]["p99, ms"] <= found["scores"]["max, ms"]
    assert found["training steps meanwhile"] > 0

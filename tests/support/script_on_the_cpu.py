"""A script for the GPU run in this process without one: all is real but the engine, MPS and the GPU's numbers."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
_ROUND_S = 0.2


class StandInEngine:
    """Generates nothing, and says so five times a second."""

    def __init__(self, folder: Path, utilization: float, env: dict[str, str], **sizes: Any) -> None:
        assert "MPS_TRAINER_RUN" in env
        self.process = SimpleNamespace(pid=0)
        self.is_alive = True
        self._began = time.monotonic()

    def rounds(self, since: float = 0.0) -> list[dict[str, Any]]:
        whole = int((time.monotonic() - self._began) / _ROUND_S)
        starts = [self._began + i * _ROUND_S for i in range(whole)]
        same = {"tokens": 100, "not finite": 0, "probe": "same"}
        return [{"begin": t, "end": t + _ROUND_S, "probe end": t + _ROUND_S, **same} for t in starts if t >= since]

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
        self.is_alive = False
        return 0


@contextmanager
def script_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module `scripts/<name>.py`, imported for the CPU and with the stand-in for its engine."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    # What the script itself sets for its children is put back as well.
    for variable in ("MPS_TRAINER_STATE_DIR", "MPS_TRAINER_VENV", "PYTHONPATH", "GPU_TASK_COMMAND", "GPU_TASK_MEMORY"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv("GPU_LAB_DEVICE", "cpu")
    usual = signal.getsignal(signal.SIGTERM)
    _forget_gpu_scripts()
    try:
        script = importlib.import_module(name)
        monkeypatch.setattr(script, "Engine", StandInEngine)
        yield script
    finally:
        signal.signal(signal.SIGTERM, usual)
        _forget_gpu_scripts()


def _forget_gpu_scripts() -> None:
    # They read their device when they are imported.
    for path in SCRIPTS.glob("gpu_*.py"):
        sys.modules.pop(path.stem, None)

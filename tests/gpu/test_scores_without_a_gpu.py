"""`scripts/gpu_scores.py` from end to end on the CPU: all is real but the engine, MPS and the GPU's numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from script_on_the_cpu import script_on_the_cpu


@pytest.mark.slow
def test_it_measures_scores_beside_a_stand_in_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = ["gpu_scores.py", "--tokens", "16", "--batches", "2", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with script_on_the_cpu("gpu_scores", monkeypatch) as script:
        # How long it takes here is no matter of this test.
        monkeypatch.setattr(script, "TARGET_MS", 60_000)
        code = script.main()
    found = json.loads(out.read_text())
    assert code == 0, (found["claims"], found["problems"], capsys.readouterr().out[-2000:])
    assert found["scores"]["batches"] == 4
    assert 0 < found["scores"]["p50, ms"] <= found["scores"]["p99, ms"] <= found["scores"]["max, ms"]
    assert found["training steps meanwhile"] > 0

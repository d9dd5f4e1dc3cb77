"""A short run of the script that measures the time from experiences to scores."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_measures_both_ways_of_scoring(tmp_path):
    short = ["--experiences", "12", "--tokens", "32", "--batches", "3", "--rounds", "2", "--warmup", "1"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/bench_scores.py", *short, "--out", tmp_path / "scores.md"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| sidecar | 6 | " in done.stdout
    assert "| operator | 6 | " in done.stdout
    assert done.stdout == (tmp_path / "scores.md").read_text()

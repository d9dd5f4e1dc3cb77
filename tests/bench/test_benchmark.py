"""The script as a whole: real processes, the real ring, the tiny engine; the REST service where FastAPI is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mps_trainer.bench.hosted_main import from_body, pack, to_body
from mps_trainer.bench.work import find_work, made_up
from mps_trainer.tasks import load_task, wire_columns
from mps_trainer.transport import leftovers

ROOT = Path(__file__).parents[2]


def test_the_tiny_form_of_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    command = [sys.executable, ROOT / "scripts/benchmark.py", "--tiny", "--out", out, "--work-dir", tmp_path / "w"]
    # Windows that last a while: on a busy machine a trainer may not run at all for some tenths of a second.
    command += ["--arms", "cpu-in-operator,sidecar-cpu", "--batches", "4", "--dedicated-s", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("time: about ")
    found = json.loads(out.with_name("out.json").read_text())
    [session] = found["sessions"]
    assert (session["task"], session["rounds"], session["cut"]) == ("A", 2, "")
    rows = {row["arm"]: row for row in session["rows"]}
    assert set(rows) == {"none", "cpu-in-operator", "sidecar-cpu"}
    for name, row in rows.items():
        assert row["outputs"] == {
            "compared": 8, "differ": 0, "not_finite": 0, "wrong_length": 0, "problems": [], "right": True
        }  # fmt: skip
        assert row["tokens_per_s"]["n"] == 2
        # A loaded machine may make a share of anything; what they are made of is in test_figures.
        assert 0 < row["rollout_kept"]["median"] < 50
        if name != "none":
            assert row["steps_per_s"]["max"] > 0
            assert 0 < row["of_dedicated"]["max"] < 50
            assert row["scores"] > 0
            assert row["memory_bytes"]["trainer"]["resident"] > 2**20
    assert {"command", "machine", "versions", "options", "left_out", "load_average"} <= set(found)
    text = out.with_name("out.md").read_text()
    assert "| sidecar-cpu |" in text
    assert "](out.png)" in text
    assert out.with_name("out.png").exists()
    monkeypatch.setenv("MPS_TRAINER_STATE_DIR", str(tmp_path / "w" / "s"))
    runs = [path.parent.name for path in (tmp_path / "w").glob("*/sidecar.log")]
    assert len(runs) == 1
    assert [leftovers(run) for run in runs] == [[]]


@pytest.mark.parametrize("name", ["A", "preference_classifier"])
def test_a_record_survives_its_way_through_http(name: str) -> None:
    work = find_work(name, {})
    columns = wire_columns(load_task(work.task, work.task_args))
    batch = pack(columns, next(made_up(columns, 5, [1, 3], "p")))
    back = from_body(columns, to_body(batch))
    assert back.num_rows == 5
    for column in columns:
        assert np.array_equal(back[column.name].values, batch[column.name].values)
        assert back[column.name].is_text == (column.kind == "text")


def test_the_rest_service_trains_and_scores(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from mps_trainer.bench.hosted import RestService

    service = RestService(find_work("A", {}, 1), tmp_path, [5], device="cpu", threads=1, env=os.environ)
    try:
        service.start()
        service.resume()
        service.pause()
        assert service.steps() > 0
        assert service.score_ms
        assert service.problem() == ""
    finally:
        service.close()


def test_bench_is_a_door_in_the_command_line() -> None:
    from mps_trainer.cli.app import run

    assert run(["bench", "--tiny", "--plan"]) == 0
    assert run(["bench", "--tiny", "--arms", "nonsense"]) == 2

"""examples/cpu_rollout/env.sh sets for runs by hand what the quickstart sets for its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples/cpu_rollout"))

from cpu_rollout.private_ray import example_environment  # noqa: E402

PRINT = f"{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"


def source(folder: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": "/somewhere"}
    script = f"source {ROOT}/examples/cpu_rollout/env.sh {folder} && {PRINT}"
    return subprocess.run(
        ["bash", "-c", script], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_it_sets_what_the_quickstart_sets(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")  # so that no model is made
    found = json.loads(source(str(tmp_path), ROOT).stdout)
    wanted = example_environment(tmp_path / "model", tmp_path)
    paths = {"PATH", "PYTHONPATH"}
    assert {key: found.get(key) for key in wanted if key not in paths} == {
        key: value for key, value in wanted.items() if key not in paths
    }
    mine = found["PYTHONPATH"].split(os.pathsep)
    assert mine[:2] == wanted["PYTHONPATH"].split(os.pathsep)[:2]
    assert mine[2:] == [str(tmp_path), "/somewhere"], "a task in the folder can be imported"


def test_elsewhere_it_says_where_it_belongs(tmp_path: Path) -> None:
    answer = source("x", tmp_path)
    assert answer.returncode == 1
    assert "from the root of the repository" in answer.stderr
    assert not (tmp_path / "x").exists()

"""What `new-task` writes is lint-free and works; it overwrites and shadows nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mps_trainer.errors import ConfigError
from mps_trainer.workbench.new_task import new_task

ROOT = Path(__file__).parents[2]


def test_the_files_pass_ruff_and_their_own_test(tmp_path: Path) -> None:
    task, test, title = new_task("my_filter", tmp_path / "tasks")
    assert title == "MyFilter"
    assert len(task.read_text().splitlines()) < 50
    assert task.read_text().count("# CHANGE") >= 4
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--no-cache", "--config", str(ROOT / "pyproject.toml")]
    # In the user's folder, where mps_trainer is one of many installed packages.
    for command in (["check", "--ignore", "D1"], ["format", "--check"]):
        subprocess.run([*ruff, *command, *config, task.name, test.name], cwd=task.parent, check=True, timeout=120)
    pytest_it = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test.name]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    answer = subprocess.run(pytest_it, cwd=task.parent, env=environment, capture_output=True, text=True, timeout=200)
    assert answer.returncode == 0, answer.stdout
    assert "1 passed" in answer.stdout


@pytest.mark.parametrize("existing", ["mine.py", "test_mine.py"])
def test_nothing_is_overwritten(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(ConfigError, match=f"{existing} exists"):
        new_task("mine", tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {existing: "precious"}


@pytest.mark.parametrize(
    "name", ["1st", "a-b", "a.b", "../up", "", "class", "json", "torch", "mps_trainer", "_", "__main__"]
)
def test_a_name_that_no_module_can_have_or_another_has_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        new_task(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "title"), [("a", "A"), ("Filter", "FilterTask"), ("_1st", "Task1st")])
def test_the_class_is_never_called_as_its_module(tmp_path: Path, name: str, title: str) -> None:
    task, _, found = new_task(name, tmp_path)
    assert found == title
    compile(task.read_text(), str(task), "exec")

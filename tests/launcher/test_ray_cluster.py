"""A private Ray, for real: it starts, answers, and goes without a trace."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from mps_trainer.errors import ConfigError, RunError
from mps_trainer.launcher.executables import find_executable
from mps_trainer.launcher.ray_cluster import use_ray


def ray_processes(folder: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(folder in part for part in process.info["cmdline"] or ())
    ]


@pytest.mark.trinity
@pytest.mark.slow
def test_a_private_ray_answers_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = set(Path("/tmp").glob("mpst-ray-*"))
    lines: list[str] = []
    with use_ray("private", "auto", lines.append, tmp_path) as ray:
        [folder] = set(Path("/tmp").glob("mpst-ray-*")) - before
        status = subprocess.run(
            [find_executable("ray"), "status"], env={**os.environ, **ray.environment}, capture_output=True, timeout=60
        )
        assert status.returncode == 0
        assert ray_processes(str(folder))
    assert not ray_processes(str(folder))
    assert not folder.exists()
    assert any(line.startswith("private Ray at ") for line in lines)


def test_a_ray_address_where_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RunError, match=r"RAY_ADDRESS=127\.0\.0\.1:1"), use_ray("auto", "auto", print, tmp_path):
        pass


def test_a_private_ray_under_an_address_in_the_yaml_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"cluster.ray_address is 10.0.0.1:6379"),
        use_ray("private", "10.0.0.1:6379", print, tmp_path),
    ):
        pass


def test_without_trinity_installed_the_message_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="no command 'no-such-command'") as caught:
        find_executable("no-such-command")
    assert "pip install" in caught.value.todo

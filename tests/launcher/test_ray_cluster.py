"""A private Ray, for real: it starts, answers, and goes without a trace."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from mps_trainer.errors import ConfigError, RunError
from mps_trainer.launcher import ray_cluster
from mps_trainer.launcher.executables import find_executable
from mps_trainer.launcher.process import spawn
from mps_trainer.launcher.ray_cluster import _start_command, use_ray


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
    # Others may make such folders meanwhile.
    ours = Path(f"/tmp/mpst-ray-{os.getpid()}-*")
    monkeypatch.setattr(ray_cluster, "RAY_FOLDERS", ours)
    lines: list[str] = []
    with use_ray("private", "auto", lines.append, tmp_path) as ray:
        [folder] = ours.parent.glob(ours.name)
        status = subprocess.run(
            [find_executable("ray"), "status"], env={**os.environ, **ray.environment}, capture_output=True, timeout=120
        )
        assert status.returncode == 0
        assert ray_processes(str(folder))
        # Ray makes its own folder 0777; nobody else gets through the one above it.
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "ray" / "session_latest").exists()
        strangers = {**os.environ, **ray.environment, "RAY_AUTH_TOKEN": "0" * 64}
        refused = subprocess.run([find_executable("ray"), "status"], env=strangers, capture_output=True, timeout=120)
        assert refused.returncode != 0, "somebody without the token got in"
    assert not ray_processes(str(folder))
    assert not folder.exists()
    assert any(line.startswith("private Ray at ") for line in lines)


def test_a_private_ray_shares_no_port_and_no_folder_with_another(tmp_path: Path) -> None:
    one, other = _start_command(tmp_path), _start_command(tmp_path)
    ports = [[int(item.rpartition("=")[2]) for item in command if "-port=" in item] for command in (one, other)]
    chosen = [port for port in ports[0] if port]
    assert len(set(chosen)) == len(chosen) == 5
    # 0 lets Ray choose. These are the ports that `ray start --help` names with a default.
    for name in (
        "--port", "--ray-client-server-port", "--dashboard-agent-listen-port", "--dashboard-agent-grpc-port",
        "--runtime-env-agent-port", "--metrics-export-port", "--min-worker-port", "--max-worker-port",
    ):  # fmt: skip
        assert any(item.startswith(f"{name}=") for item in one), name


def test_a_private_ray_gets_what_its_processes_must_inherit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def note(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        seen.append(env)
        return spawn(["/bin/false"], env=env, **options)

    monkeypatch.setattr(ray_cluster, "spawn", note)
    with (
        pytest.raises(RunError, match="`ray start` ended with"),
        use_ray("private", "auto", print, tmp_path, {"CUDA_MPS_PIPE_DIRECTORY": "/our/pipe"}),
    ):
        pass
    assert seen[0]["CUDA_MPS_PIPE_DIRECTORY"] == "/our/pipe"


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

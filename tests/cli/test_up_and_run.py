"""`up` and `run` as processes with the real sidecar: how much memory they take, and what a closed pipe changes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]
FAKE_TRINITY = Path(__file__).resolve().parents[1] / "launcher" / "fake_trinity.py"
MOST_KIB = 120 * 1024

_MEASURED = """
import contextlib, sys
from mps_trainer.cli.app import run
from mps_trainer.launcher import run_trinity
from mps_trainer.launcher.ray_cluster import Ray
trinity, *arguments = sys.argv[1:]
run_trinity.find_executable = lambda _: trinity
run_trinity.use_ray = lambda *_: contextlib.nullcontext(Ray("none"))
code = run(arguments)
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
sys.stderr.write(f"\\n{code} {peak}\\n")
sys.exit(code)
"""


@pytest.fixture
def measured(tmp_path: Path, environment: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    """Start `mps-trainer ARGS` with a stand-in for `trinity` and no Ray; "<exit code> <peak KiB>" ends its stderr."""
    trinity = tmp_path / "trinity"
    trinity.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE_TRINITY}" "$@"\n')
    trinity.chmod(stat.S_IRWXU)

    def start(*arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _MEASURED, str(trinity), *map(str, arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def code_and_peak_kib(stderr: str) -> tuple[int, int]:
    code, peak = stderr.splitlines()[-1].split()
    return int(code), int(peak)


@pytest.mark.slow
def test_up_with_the_real_sidecar_is_lean(
    measured: Callable[..., subprocess.Popen[str]], mps_trainer: Command, config: Path
) -> None:
    process = measured("up", config)
    try:
        output, errors = process.communicate(timeout=200)
        [run] = json.loads(mps_trainer("status", "--json").stdout)
    finally:
        mps_trainer("down")
    code, peak_kib = code_and_peak_kib(errors)
    assert code == 0, errors
    assert "READY after" in output
    assert run["status"]["state"] == "ready"
    assert peak_kib < MOST_KIB


@pytest.mark.slow
def test_run_with_the_real_sidecar_and_a_fake_trinity_is_lean(
    measured: Callable[..., subprocess.Popen[str]], config: Path
) -> None:
    output, errors = measured("run", config, "--", "talks").communicate(timeout=200)
    code, peak_kib = code_and_peak_kib(errors)
    assert code == 3, output + errors
    assert "saw no experience" in errors, "the stand-in fed nothing, and whoever runs it is told"
    assert output.count("x" * 9_999) == 100
    assert peak_kib < MOST_KIB


@pytest.mark.slow
@pytest.mark.parametrize(("behaviour", "expected"), [("talks", 3), ("fails-with-1", 1)])
def test_run_with_a_fake_trinity_tells_the_truth_when_nobody_reads_its_output(
    measured: Callable[..., subprocess.Popen[str]], config: Path, tmp_path: Path, behaviour: str, expected: int
) -> None:
    process = measured("run", config, "--", behaviour)
    assert process.stdout is not None
    process.stdout.close()
    errors = process.stderr.read() if process.stderr else ""
    assert process.wait(200) == expected, errors
    console = tmp_path / "ckpt" / "lab" / "run.mps-trainer" / "latest" / "trinity.log"
    assert console.read_text().count("x" * 9_999) == (100 if behaviour == "talks" else 0)


def test_a_command_whose_output_nobody_reads_succeeds(environment: dict[str, str], config: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    answer = subprocess.run(
        [sys.executable, "-m", "mps_trainer", "plan", str(config)],
        env=environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writing)
    assert (answer.returncode, answer.stderr) == (0, "")

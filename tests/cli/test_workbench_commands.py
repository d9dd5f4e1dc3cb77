"""new-task, check-task and record as a person uses them."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mps_trainer.operator.recording import read_recording

Command = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "examples/port_your_operator/experiences.jsonl"
CLASSIFIER = ("preference_classifier", "--device", "cpu", "--batch-size", 64)
ARGUMENTS = {"feature_dim": 8, "hidden_size": 16, "depth": 1}


def test_from_a_new_task_to_the_line_for_the_yaml(mps_trainer: Command, tmp_path: Path) -> None:
    written = mps_trainer("new-task", "my_filter")
    assert written.returncode == 0, written.stderr
    [follows] = re.findall(r"mps-trainer (check-task \S+) --data", written.stdout)
    assert 'task: "my_filter:MyFilter"' in written.stdout
    answer = mps_trainer(*follows.split(), "--data", DATA, "--device", "cpu", "--batch-size", 32, "--steps", 50)
    assert answer.returncode == 0, answer.stderr
    for line in (
        r"column +tokens: response_tokens, int32, up to 4096",
        r"experiences +760 of 760 can be fed, from 19 batches",
        r"worst batch +20 steps of up to 32, made up: median [\d.]+ ms",
        r"step +median [\d.]+ ms, p95 [\d.]+ ms; 50 steps of 32, 2 times through the data",
        r"loss +0\.\d+ first, 0\.\d+ last",
        r"auc +0\.\d+ untrained, 0\.\d+ trained, on 72 experiences held out",
        r"score +768 experiences in [\d.]+ ms",
        r"memory +\d+\.\d MiB at the most \(growth",
        r"  memory: 0\.25GiB",
    ):
        assert re.search(line, answer.stdout), (line, answer.stdout)
    assert mps_trainer("new-task", "my_filter").returncode == 2


def test_a_task_that_learns_without_warnings(mps_trainer: Command) -> None:
    answer = mps_trainer("check-task", *CLASSIFIER, "--data", DATA, "--task-args", json.dumps(ARGUMENTS))
    assert answer.returncode == 0, answer.stderr
    assert "warning" not in answer.stdout
    [auc] = re.findall(r"untrained, (0\.\d+) trained", answer.stdout)
    assert float(auc) > 0.8


def test_without_data_it_says_what_it_did_not_look_at(mps_trainer: Command) -> None:
    answer = mps_trainer("check-task", *CLASSIFIER, "--task-args", json.dumps(ARGUMENTS))
    assert answer.returncode == 0, answer.stderr
    assert "no --data: made-up batches only" in answer.stdout
    assert "memory: 0.25GiB" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "found", "todo"),
    [
        (("preference_clasifier",), "no task 'preference_clasifier'", "did you mean 'preference_classifier'?"),
        ((*CLASSIFIER, "--task-args", "{"), "--task-args is no JSON", "feature_dim"),
        ((*CLASSIFIER, "--data", "no.jsonl"), "no such file: no.jsonl", "mps-trainer record"),
        (
            (*CLASSIFIER, "--data", DATA, "--task-args", '{"feature": "hiden_state", "feature_dim": 8}'),
            "reads info.hiden_state, which none of the 760 experiences has",
            "did you mean 'info.hidden_state'?",
        ),
        (
            (*CLASSIFIER, "--data", DATA, "--task-args", '{"feature_dim": 17}'),
            "none of 760 experiences can be used: column 'features' (info.hidden_state)",
            "width 8",
        ),
        (("tried_tasks:Nan", "--device", "cpu"), "task Nan, step 0: the loss is nan", "learning_rate"),
        (
            ("tried_tasks:WrongShape", "--device", "cpu"),
            "task WrongShape, step 1: score raised",
            "mps-trainer --debug check-task",
        ),
        (("tried_tasks:Good", "--device", "cuda:0"), "sees no CUDA device", "device: cpu"),
    ],
    ids=["task", "json", "file", "source", "width", "nan", "shape", "device"],
)
def test_what_cannot_work_is_exit_2_with_what_to_do(
    mps_trainer: Command, environment: dict[str, str], arguments: tuple[object, ...], found: str, todo: str
) -> None:
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/support"), environment.get("PYTHONPATH", "")])
    answer = mps_trainer("check-task", *arguments)
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert found in answer.stderr
    assert todo in answer.stderr
    assert "Traceback" not in answer.stderr


_FAKE_TRINITY = """
import sys
from pathlib import Path
from omegaconf import OmegaConf
from mps_trainer.operator.recording import Recorder, read_recording
config = OmegaConf.load(sys.argv[3])
[operator] = config.data_processor.experience_pipeline.operators
assert operator.args.record_only is True and operator.args.device == "cpu", operator
recorder = Recorder(Path(operator.args.record), operator.args.record_max)
for batch in read_recording(Path(DATA)).batches if "records" in sys.argv else ():
    recorder.add(batch)
job = Path(config.checkpoint_root_dir) / config.project / config.name
job.mkdir(parents=True, exist_ok=True)
(job / "explorer_meta.json").write_text('{"latest_iteration": %d}' % config.buffer.total_steps)
"""

_RECORD = """
import contextlib, sys
from mps_trainer.cli.app import run
from mps_trainer.launcher import run_trinity
from mps_trainer.launcher.ray_cluster import Ray
run_trinity.find_executable = lambda _: sys.argv[1]
run_trinity.use_ray = lambda *_: contextlib.nullcontext(Ray("none"))
sys.exit(run(sys.argv[2:]))
"""


@pytest.fixture
def record(tmp_path: Path, environment: dict[str, str]) -> Command:
    script = tmp_path / "fake_trinity.py"
    script.write_text(f"DATA = {str(DATA)!r}\n{_FAKE_TRINITY}")
    trinity = tmp_path / "trinity"
    trinity.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    trinity.chmod(stat.S_IRWXU)

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _RECORD, str(trinity), "record", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=tmp_path)

    return call


def test_record_runs_trinity_without_a_sidecar(record: Command, config: Path, tmp_path: Path) -> None:
    before = config.read_bytes()
    answer = record(config, "--to", "e.jsonl", "--max", 50, "--", "records")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "recorded 50 experiences in e.jsonl" in answer.stdout
    assert read_recording(tmp_path / "e.jsonl").size == 50
    assert config.read_bytes() == before
    assert list(tmp_path.glob("*.mps.yaml")) == [], "the derived config goes with the run"
    assert list((tmp_path / "ckpt").rglob("*.mps-trainer")) == [], "no run folder"
    again = record(config, "--to", "e.jsonl", "--", "records")
    assert again.returncode == 2
    assert "e.jsonl exists" in again.stderr
    assert read_recording(tmp_path / "e.jsonl").size == 50


def test_a_run_that_brings_no_experience_is_a_failure_and_leaves_no_file(
    record: Command, config: Path, tmp_path: Path
) -> None:
    answer = record(config, "--to", tmp_path / "e.jsonl", "--", "is silent")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "no experience came by the operator" in answer.stderr
    assert not (tmp_path / "e.jsonl").exists()


@pytest.mark.parametrize("line", ["record: /tmp/x", "record_only: true"])
def test_record_refuses_a_config_that_records_already(record: Command, config: Path, tmp_path: Path, line: str) -> None:
    config.write_text(config.read_text().replace("ring_slots: 2", line))
    answer = record(config, "--to", tmp_path / "e.jsonl")
    assert answer.returncode == 2
    assert f"{line.partition(':')[0]} is set in trinity.yaml" in answer.stderr
    assert not (tmp_path / "e.jsonl").exists()

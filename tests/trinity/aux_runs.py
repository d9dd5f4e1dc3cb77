"""What the tests of the main job share: the operator's block, and what a run left in its folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trinity_harness import BIN_DIR, RunOutcome, TrinityRun

from mps_trainer.run import Status

MPS_TRAINER = str(BIN_DIR / "mps-trainer")
MPS_RUN = [MPS_TRAINER, "run"]


def operator(**args: Any) -> dict[str, Any]:
    """Our operator's block of the YAML."""
    return {"name": "mps_trainer.operator.AuxTrainer", "args": args}


def run_folder(config: Path) -> Path:
    """The run folder of the only run of this config."""
    folders = list(config.parent.glob(f"checkpoints/*/{config.stem}.mps-trainer/[0-9a-f]*"))
    assert len(folders) == 1, folders
    return folders[0]


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metric(outcome: RunOutcome, key: str) -> list[float]:
    """A metric of the operator as Trinity's monitor got it, step by step."""
    return [value for _, value in outcome.scalars("explorer")[f"experience_pipeline/aux_trainer/{key}"]]


def up(trinity_run: TrinityRun, config: Path) -> Path:
    """`mps-trainer up`; the derived config."""
    answer = command(trinity_run, "up", str(config))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return config.with_suffix(".mps.yaml")


def command(trinity_run: TrinityRun, *words: str) -> subprocess.CompletedProcess[str]:
    """An mps-trainer command in the run's environment."""
    return subprocess.run(
        [MPS_TRAINER, *words],
        env=trinity_run.environment,
        cwd=trinity_run.work_dir,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_file(environment: Mapping[str, str], config: Path) -> Path:
    """The run file in the state folder."""
    run_id = run_folder(config).name
    return Path(environment["MPS_TRAINER_STATE_DIR"]) / "runs" / f"{run_id}.json"


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    """Look again and again until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)


def sidecar_pid(config: Path) -> int:
    """The PID of the sidecar that is ready now."""
    return Status.load(run_folder(config)).pid


def supervisor_pid(config: Path) -> int:
    """The parent of the sidecar."""
    stat = Path(f"/proc/{sidecar_pid(config)}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def mapping_pids(config: Path) -> set[int]:
    """The processes that have this run's shared memory mapped: the sidecar and Trinity's coordinator."""
    run_id = run_folder(config).name
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"mpst.{run_id}." in maps.read_text():
                found.add(int(maps.parent.name))
        except (OSError, UnicodeDecodeError):  # noqa: PERF203  # it has just ended
            continue
    return found


def shared_memory_of(config: Path) -> list[str]:
    """Names in /dev/shm that belong to the run of this config."""
    run_id = run_folder(config).name
    return [name for name in os.listdir("/dev/shm") if run_id in name]

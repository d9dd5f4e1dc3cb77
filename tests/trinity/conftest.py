"""One private Ray cluster for all tests here, and a namespace, a folder and an engine for each."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "cpu_rollout"))

from cpu_rollout.private_ray import PrivateRay, example_environment
from trinity_harness import EXAMPLE_DIR, TrinityRun


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything that uses the cluster is a `trinity` test, so that `-m "not trinity"` leaves it out."""
    for item in items:
        if "private_ray" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.trinity)
            # A minute each, and several on a slow machine.
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model, built in a process of its own: torch stays out of this one."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run(
        [sys.executable, "-m", "cpu_rollout.tiny_model", str(folder)], cwd=EXAMPLE_DIR, check=True, timeout=300
    )
    return folder


@pytest.fixture(scope="session")
def private_ray(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateRay]:
    """The session's cluster. Its environment is what every actor inherits."""
    pytest.importorskip("ray")
    work_dir = tmp_path_factory.mktemp("trinity")
    environment = {
        **example_environment(tiny_model, work_dir),
        "MPS_TRAINER_STATE_DIR": str(tmp_path_factory.mktemp("state")),
    }
    with PrivateRay(environment, num_cpus=16) as cluster:
        yield cluster


@pytest.fixture
def trinity_run(private_ray: PrivateRay, tmp_path: Path, request: pytest.FixtureRequest) -> TrinityRun:
    """Configs, engines and runs of one test."""
    name = re.sub(r"\W+", "_", request.node.name).strip("_")[:40]
    return TrinityRun(name, tmp_path, private_ray.environment)

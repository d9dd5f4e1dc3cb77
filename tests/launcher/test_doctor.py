"""The doctor's judgements, over recorded versions and readings."""

from __future__ import annotations

from pathlib import Path

import pytest

from mps_trainer.launcher.doctor import (
    Check,
    Level,
    check_gpu,
    check_leftovers,
    check_packages,
    check_python,
    check_ray_auth,
    check_shared_memory,
    check_state_folder,
    run_checks,
)
from mps_trainer.launcher.gpu import Gpu, GpuReading
from mps_trainer.launcher.machine import Machine
from mps_trainer.run import new_run_id, run_paths

# What `pip install trinity-rft==0.6.0` gave with nothing held back, recorded.
UNPINNED = {
    "torch": "2.13.0+cpu",
    "trinity-rft": "0.6.0",
    "ray": "2.60.0",
    "numpy": "1.26.4",
    "pyarrow": "26.0.0",
    "sqlalchemy": "2.1.0",
    "vllm": "0.23.0",
}
PINNED = {**UNPINNED, "pyarrow": "23.0.1", "datasets": "4.4.1", "greenlet": "3.2.4"}


def bad(versions: dict[str, str]) -> list[Check]:
    return [check for check in check_packages(versions.get) if check.level is not Level.OK]


def test_the_pins_of_the_extra_are_fine_recorded() -> None:
    assert bad(PINNED) == []


def test_the_known_bad_pins_are_named_recorded() -> None:
    assert [check.name for check in bad(UNPINNED)] == ["numpy and pyarrow", "sqlalchemy"]
    assert [check.name for check in bad({**PINNED, "datasets": "5.2.0"})] == ["datasets and pyarrow"]
    assert [check.name for check in bad({**PINNED, "trinity-rft": "0.7.0"})] == ["trinity-rft version"]
    assert all(check.todo for check in bad(UNPINNED))


def test_nothing_installed_is_a_problem_only_where_the_sidecar_needs_it() -> None:
    levels = {check.name: check.level for check in check_packages({}.get)}
    assert levels == {
        "torch": Level.PROBLEM,
        "pyarrow": Level.PROBLEM,
        "trinity-rft": Level.WARNING,
        "ray": Level.WARNING,
    }


@pytest.mark.parametrize(("version", "level"), [((3, 9, 1), Level.PROBLEM), ((3, 12, 4), Level.OK)])
def test_python_versions(version: tuple[int, ...], level: Level) -> None:
    assert check_python(version).level is level


def test_a_stale_token_file_of_ray_recorded(tmp_path: Path) -> None:
    assert list(check_ray_auth("2.60.0", {}, tmp_path)) == []
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    [check] = check_ray_auth("2.60.0", {}, tmp_path)
    assert "RAY_AUTH_MODE=disabled" in check.todo
    assert list(check_ray_auth("2.60.0", {"RAY_AUTH_MODE": "disabled"}, tmp_path)) == []


def test_a_small_dev_shm() -> None:
    check = check_shared_memory(Machine(1, 1, 32 * 2**20, 32 * 2**20))
    assert check.level is Level.PROBLEM
    assert "45.0 MiB" in check.found


def test_a_state_folder_that_others_can_read(state: Path) -> None:
    state.mkdir(mode=0o755)
    state.chmod(0o755)
    check = check_state_folder()
    assert check.level is Level.PROBLEM
    assert "mode 755" in check.found
    state.chmod(0o700)


def test_gpus_recorded() -> None:
    gpu = Gpu(0, "GPU-1", "NVIDIA H200", 150_754_820_096, 150_110_208_000)
    machine = Machine(1, 1, 1, 1, GpuReading((gpu,), "580.95.05"))
    found = list(check_gpu(machine, None))
    assert [check.level for check in found] == [Level.OK, Level.WARNING]
    assert "driver 580.95.05" in found[0].found
    assert check_gpu(machine, "/usr/bin/nvidia-cuda-mps-control")


def test_leftovers_are_counted() -> None:
    run_id = new_run_id()
    run_paths(run_id).run_file.write_text("{}")
    assert run_id in check_leftovers().found
    run_paths(run_id).remove()


def test_all_checks_run_here() -> None:
    assert {"python", "torch", "/dev/shm", "state folder", "leftovers"} <= {check.name for check in run_checks()}

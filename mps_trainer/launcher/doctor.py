"""Look at this machine and this venv without starting anything: what would stop a run, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mps_trainer.config import Settings, format_size
from mps_trainer.errors import MpsTrainerError
from mps_trainer.launcher.leftovers import find_leftovers, find_waiting
from mps_trainer.launcher.machine import Machine, read_machine
from mps_trainer.launcher.plan import CHANNEL_OVERHEAD
from mps_trainer.mps import checks as mps_checks
from mps_trainer.run import STATE_DIR_VARIABLE, live_runs, state_dir

Version = tuple[int, ...]
FindVersion = Callable[[str], str | None]


class Level(str, Enum):
    """How bad a finding is. A PROBLEM stops a run."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Check:
    """One finding, and what to do when it is not OK."""

    name: str
    level: Level
    found: str
    todo: str = ""


def installed(package: str) -> str | None:
    """The version of a package in this venv, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_checks() -> list[Check]:
    """All checks of this machine."""
    machine = read_machine()
    return [
        check_python(sys.version_info[:3]),
        *check_packages(installed),
        *check_ray_auth(installed("ray"), os.environ, Path.home()),
        check_shared_memory(machine),
        check_state_folder(),
        *check_gpu(machine, shutil.which("nvidia-cuda-mps-control")),
        *check_mps(machine),
        check_leftovers(),
        *check_waiting(),
    ]


def check_python(version: Version) -> Check:
    """Python 3.10 to 3.12, as trinity-rft 0.6 asks."""
    text = ".".join(map(str, version))
    if (3, 10) <= version < (3, 13):
        return Check("python", Level.OK, f"{text} on {platform.machine()}")
    return Check("python", Level.PROBLEM, text, "make a venv with Python 3.10, 3.11 or 3.12")


def check_packages(find: FindVersion) -> Iterator[Check]:
    """Packages of a `trinity run`, and the combinations that are known to break it."""
    for package in ("torch", "pyarrow", "trinity-rft", "ray"):
        version = find(package)
        todo = "" if version else "pip install -e '.[trinity]' in the clone of mps-trainer"
        level = Level.OK if version else (Level.PROBLEM if package in ("torch", "pyarrow") else Level.WARNING)
        yield Check(package, level, version or "not installed", todo)
    trinity = find("trinity-rft")
    if trinity and _parts(trinity)[:2] != (0, 6):
        yield Check("trinity-rft version", Level.WARNING, trinity, "pip install 'trinity-rft>=0.6,<0.7'")
    yield from _known_bad_pins(find, with_trinity=trinity is not None)


def _known_bad_pins(find: FindVersion, *, with_trinity: bool) -> Iterator[Check]:
    numpy, pyarrow, datasets, alchemy = (find(name) for name in ("numpy", "pyarrow", "datasets", "sqlalchemy"))
    if numpy and pyarrow and _parts(numpy) < (2,) and _parts(pyarrow) >= (24,):
        yield Check(
            "numpy and pyarrow",
            Level.PROBLEM,
            f"pyarrow {pyarrow} refuses numpy {numpy} at import",
            "pip install 'pyarrow<24' (verl pins numpy below 2)",
        )
    if datasets and pyarrow and _parts(datasets) >= (5,) and _parts(pyarrow) < (24,):
        yield Check(
            "datasets and pyarrow",
            Level.PROBLEM,
            f"datasets {datasets} wants pyarrow 24 or newer, there is {pyarrow}",
            "pip install 'datasets>=4,<5'",
        )
    if with_trinity and alchemy and not find("greenlet"):
        yield Check(
            "sqlalchemy",
            Level.PROBLEM,
            f"sqlalchemy {alchemy} without greenlet, which Trinity's buffers need",
            "pip install 'sqlalchemy[asyncio]'",
        )
    if with_trinity and not find("vllm"):
        yield Check(
            "vllm",
            Level.WARNING,
            "not installed, and Trinity imports it even where it is not used",
            "pip install 'trinity-rft[vllm]' on a GPU machine; examples/cpu_rollout shows a way without",
        )


def check_ray_auth(ray: str | None, environment: os._Environ[str] | dict[str, str], home: Path) -> Iterator[Check]:
    """A token file that turns on Ray's authentication in `ray start` and not in `ray status`."""
    if ray is None or _parts(ray) < (2, 52) or environment.get("RAY_AUTH_MODE"):
        return
    token = home / ".ray" / "auth_token"
    if token.exists():
        yield Check(
            "ray authentication",
            Level.WARNING,
            f"{token} exists and RAY_AUTH_MODE is not set: `trinity run` may say that Ray is not running",
            "export RAY_AUTH_MODE=disabled (or token) in every shell, that of `ray start` too",
        )


def check_shared_memory(machine: Machine) -> Check:
    """Room in /dev/shm for the rings of one operator at the default sizes."""
    defaults = Settings()
    need = defaults.ring_slots * defaults.ring_slot + CHANNEL_OVERHEAD
    found = f"{format_size(machine.shm_free)} free of {format_size(machine.shm_total)}"
    if machine.shm_free >= need:
        return Check("/dev/shm", Level.OK, found)
    return Check(
        "/dev/shm",
        Level.PROBLEM,
        f"{found}; the default rings need {format_size(need)}",
        "lower ring_slot or ring_slots, or give more: docker run --shm-size, mount -o remount,size=... /dev/shm",
    )


def check_state_folder() -> Check:
    """The folder of run files and locks, and the runs that live."""
    try:
        alive = [record.run_id for _, record in live_runs()]
        return Check("state folder", Level.OK, f"{state_dir()}, live runs: {', '.join(alive) or 'none'}")
    except MpsTrainerError as error:
        return Check("state folder", Level.PROBLEM, error.message, error.todo)
    except OSError as error:
        return Check("state folder", Level.PROBLEM, str(error), f"set {STATE_DIR_VARIABLE} to a local folder of yours")


def check_gpu(machine: Machine, control_binary: str | None) -> Iterator[Check]:
    """Driver, GPUs, and what MPS would need."""
    if not machine.gpu.gpus:
        yield Check("gpu", Level.OK, f"none: {machine.gpu.why_none()}; the sidecar trains on the CPU")
        return
    for gpu in machine.gpu.gpus:
        found = f"{gpu.name}, {format_size(gpu.free)} free of {format_size(gpu.total)}, driver {machine.gpu.driver}"
        if gpu.mig:
            yield Check(f"gpu {gpu.index}", Level.WARNING, f"{found}, MIG is on", "MPS limits do not hold under MIG")
        else:
            yield Check(f"gpu {gpu.index}", Level.OK, found)
    if control_binary:
        yield Check("mps control", Level.OK, control_binary)
    else:
        yield Check(
            "mps control",
            Level.WARNING,
            "nvidia-cuda-mps-control is not on PATH",
            "it comes with the driver; in a container, let the runtime mount it (NVIDIA_DRIVER_CAPABILITIES=all)",
        )


def check_mps(machine: Machine) -> list[Check]:
    """What would stand in the way of sharing a GPU; nothing where there is none."""
    if not machine.gpu.gpus:
        return []
    found = mps_checks.run_checks(mps_checks.read_surroundings())
    return [Check(f"mps: {check.name}", Level(check.level), check.found, check.todo) for check in found]


def check_leftovers() -> Check:
    """Files and shared memory of dead runs."""
    try:
        found = find_leftovers()
    except MpsTrainerError as error:
        return Check("leftovers", Level.PROBLEM, error.message, error.todo)
    if not found:
        return Check("leftovers", Level.OK, "none")
    size = sum(item.num_bytes for item in found)
    runs = ", ".join(sorted({item.run_id for item in found}))
    return Check(
        "leftovers",
        Level.WARNING,
        f"{len(found)} of dead runs ({runs}), {format_size(size)}",
        "mps-trainer doctor --clean removes them; so does the next start",
    )


def check_waiting() -> Iterator[Check]:
    """Shared memory of runs that do not live which no rule may remove yet, and until when."""
    try:
        found = find_waiting()
    except MpsTrainerError:
        # `check_leftovers` has met it too, and says so.
        return
    for run_id, why in sorted({(item.run_id, item.why) for item in found}):
        items = [item for item in found if (item.run_id, item.why) == (run_id, why)]
        size = format_size(sum(item.num_bytes for item in items))
        text = f"{len(items)} in /dev/shm of run {run_id}, {size}: {why}"
        times = [item.until for item in items if item.until is not None]
        if not times:
            yield Check("still in use", Level.OK, text)
            continue
        until = time.strftime("%H:%M:%S", time.localtime(max(times)))
        yield Check("waiting", Level.WARNING, f"{text}; until {until}", f"after {until}: mps-trainer doctor --clean")


def _parts(version: str) -> Version:
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)

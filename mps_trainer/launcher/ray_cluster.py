"""The Ray that a run uses: one that is there, or a private one that starts and ends with the run.

Ray is a command here and never an import. A private one has its own ports, its own temporary folder with a short
path (a Unix socket's path ends at 107 bytes), its own token and its own session; it is ended by its own processes' ids
only, since Ray's own stop command would end every Ray of the machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import psutil

from mps_trainer.errors import ConfigError, RunError
from mps_trainer.launcher.executables import find_executable
from mps_trainer.launcher.leftovers import RAY_FOLDER_LOCK, RAY_FOLDERS
from mps_trainer.launcher.process import describe_exit, spawn, stop
from mps_trainer.run import try_hold

RayChoice = Literal["auto", "private", "existing"]

START_SECONDS = 120.0
STOP_SECONDS = 20.0
_STATUS_SECONDS = 60.0
_CONNECT_SECONDS = 5.0
_POLL_S = 0.1
_MIN_CPUS = 8  # each model and each runner reserves one, and none of them uses a whole core


@dataclass(frozen=True)
class Ray:
    """A Ray cluster that a `trinity run` can use.

    Attributes:
        description: for people.
        environment: what a child needs to find it.
    """

    description: str
    environment: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def use_ray(
    choice: RayChoice,
    yaml_address: str,
    progress: Callable[[str], None],
    logs: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Ray]:
    """A Ray for the length of the `with`; a private one is stopped at its end.

    Args:
        yaml_address: `cluster.ray_address` of the user's YAML; Trinity follows it whatever we start.
        logs: where a private Ray's output goes.
        environment: what the processes of a private Ray get besides this process's own.
    """
    if yaml_address != "auto" and choice == "private":
        raise ConfigError(
            f"cluster.ray_address is {yaml_address}, so Trinity would not use a private Ray",
            "remove it from the YAML, or use --ray existing",
        )
    if choice != "private":
        found = _find_existing(required=choice == "existing" or yaml_address != "auto", progress=progress)
        if found is not None:
            yield found
            return
    with private_ray(progress, logs, environment=environment) as ray:
        yield ray


def _find_existing(*, required: bool, progress: Callable[[str], None]) -> Ray | None:
    address = os.environ.get("RAY_ADDRESS", "")
    if not required and not address and not _some_ray_runs():
        return None
    if address:
        _check_somebody_listens(address)
    progress("asking `ray status` for a running Ray")
    try:
        answer = subprocess.run(
            [find_executable("ray"), "status"], capture_output=True, text=True, timeout=_STATUS_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RunError(
            f"`ray status` gave no answer in {_STATUS_SECONDS:.0f} s",
            "see whether that Ray is healthy, or use --ray private",
        ) from None
    if answer.returncode == 0:
        return Ray(f"the Ray that is running{f' at {address}' if address else ''}")
    if not required and not address:
        return None
    said = (answer.stderr or answer.stdout).strip().splitlines()
    raise RunError(
        f"no Ray answers{f' at RAY_ADDRESS={address}' if address else ''}: {said[-1] if said else 'no message'}",
        "start one with `ray start --head`, or use --ray private; if it runs with tokens, set RAY_AUTH_MODE alike",
    )


def _check_somebody_listens(address: str) -> None:
    # Where nobody listens, `ray status` takes most of a minute to say so.
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise RunError(
            f"no Ray answers at RAY_ADDRESS={address}: {error}",
            "unset RAY_ADDRESS, start that Ray again, or use --ray private",
        ) from None


def _some_ray_runs() -> bool:
    # `ray status` takes seconds; this look takes milliseconds and says no on most machines.
    return any(process.info["name"] == "gcs_server" for process in psutil.process_iter(["name"]))


@contextlib.contextmanager
def private_ray(
    progress: Callable[[str], None],
    logs: Path,
    *,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Ray]:
    """A one-node cluster of this user alone, up inside the `with`.

    Args:
        logs: `ray.log` goes there.
        environment: what Ray's processes get besides this process's own.
        options: for `ray start`, behind our own, which they override.

    Raises:
        RunError: it did not come up; the message shows the end of its output.
    """
    # Ray opens its temporary folder to every user; the folder above it stays ours (mkdtemp makes it 0700).
    folder = Path(tempfile.mkdtemp(prefix=RAY_FOLDERS.name.rstrip("*"), dir=RAY_FOLDERS.parent))
    # While it is held, `doctor --clean` leaves the folder alone; a SIGKILL of this process drops it.
    lock = try_hold(folder / RAY_FOLDER_LOCK)
    # Ray listens on the machine's own address too, and whoever reaches it can run code: with a token of this cluster
    # nobody else gets in. A stale ~/.ray/auth_token, which half of Ray would heed, does not count beside it either.
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    log = logs / "ray.log"
    started = time.monotonic()
    progress("starting a private Ray (about ten seconds)")
    inherited = {key: value for key, value in {**os.environ, **(environment or {})}.items() if key != "RAY_ADDRESS"}
    command = [*_start_command(folder / "ray"), *options]
    head = spawn(command, env={**inherited, **own}, log=log, dies_with_us=True)
    try:
        address = _wait_for_address(head, folder / "ray", log)
        progress(f"private Ray at {address} after {time.monotonic() - started:.1f} s")
        yield Ray(f"a private Ray at {address}", {**own, "RAY_ADDRESS": address})
    finally:
        progress("stopping the private Ray")
        stop_tree(head, grace_s=STOP_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()


def _start_command(folder: Path) -> list[str]:
    num_cpus = max(os.cpu_count() or 1, _MIN_CPUS)
    # Every port that has a fixed default, so that two clusters of one machine never meet.
    client, agent_http, agent_grpc, runtime_env, metrics = _free_ports(5)
    return [
        find_executable("ray"),
        "start",
        "--head",
        "--block",
        "--port=0",
        f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent_http}",
        f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--runtime-env-agent-port={runtime_env}",
        f"--metrics-export-port={metrics}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--node-ip-address=127.0.0.1",
        f"--temp-dir={folder}",
        f"--num-cpus={num_cpus}",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]


def _wait_for_address(head: subprocess.Popen[bytes], folder: Path, log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    address = folder / "ray_current_cluster"
    # The raylet's socket comes last: before it there is an address, and no node.
    raylet = "session_2*/sockets/raylet"
    while time.monotonic() < deadline:
        if head.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            raise RunError(f"`ray start` ended with {describe_exit(head.returncode)}:\n{tail}", f"see {log}")
        up = "Ray runtime started" in log.read_text(errors="replace")
        if up and address.exists() and any(folder.glob(raylet)):
            return address.read_text().strip()
        time.sleep(_POLL_S)
    raise RunError(f"`ray start` was not up after {START_SECONDS:.0f} s", f"see {log}")


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all are held until the last is chosen, so they differ."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def stop_tree(head: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """End our child and whatever it started: first in order, then what is left of its tree and session, by id."""
    tree = _tree(head.pid)
    stop(head, grace_s=grace_s)
    # What lost its parent is no longer in the tree, but still in the session that we made for it.
    left = {process for process in (*tree, *_session(head.pid)) if process.is_running()}
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=5)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=5)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _session(leader: int) -> list[psutil.Process]:
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if pid != leader and os.getsid(pid) == leader:
                members.append(psutil.Process(pid))
    return members

"""A Ray cluster of our own on this machine: free ports, a temp dir of its own, ended by the PIDs that we started.

    with PrivateRay(environment={...}) as ray_cluster:
        subprocess.run([...], env=ray_cluster.environment)

It neither sees nor disturbs another Ray. (`ray stop` would end every Ray of the machine.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

EXAMPLE_DIR = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1


def example_environment(model: Path, work_dir: Path) -> dict[str, str]:
    """The variables that Ray's processes and the driver of the example's YAMLs both need."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(EXAMPLE_DIR / "stand_ins"), str(EXAMPLE_DIR), *([inherited] if inherited else [])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "CPU_ROLLOUT_DIR": str(EXAMPLE_DIR),
        "CPU_ROLLOUT_MODEL": str(model),
        "CPU_ROLLOUT_WORK": str(work_dir),
        "TINKER_STAND_IN_DIR": str(work_dir / "tinker"),
        # Several of Ray's processes share few cores: one thread each.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work_dir / "datasets"),
        "PYTHONWARNINGS": "ignore",
        # Ray listens on the machine's own address too. With a token of this cluster nobody else gets in, and a
        # token that an earlier ray.init left in the home folder (which half of Ray would heed) does not count.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all are held while the last is chosen, so they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def _end_with_parent() -> None:
    """In the child, before exec: SIGTERM when the parent dies, so that a killed test run leaves no cluster."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_family(leader: psutil.Process, timeout_s: float) -> None:
    """SIGTERM to the leader, which ends its family in order; SIGKILL to what is left after `timeout_s`.

    psutil compares start times, so a process that has got a reused PID is left alone.
    """
    try:
        family = [leader, *leader.children(recursive=True)]
        leader.terminate()
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs(family, timeout=timeout_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


class PrivateRay:
    """A one-node cluster without GPUs, up between `__enter__` and `__exit__`.

    Attributes:
        environment: the whole environment for processes that use the cluster, RAY_ADDRESS included.
        temp_dir: Ray's logs and sockets; removed at the end.
    """

    def __init__(self, environment: Mapping[str, str], *, num_cpus: int = 8) -> None:
        self.environment: dict[str, str] = {**os.environ, **environment}
        self.num_cpus = num_cpus  # a number for Ray's arithmetic: every engine and runner reserves one
        self.temp_dir = Path()
        self._private_dir = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrivateRay:
        # Ray's socket paths must stay under 107 bytes, so the folder is short whatever TMPDIR says. Ray opens its
        # temp dir to every user; the folder above it stays ours.
        self._private_dir = tempfile.mkdtemp(prefix="cpu-ray-", dir="/tmp")
        self.temp_dir = Path(self._private_dir, "ray")
        self.temp_dir.mkdir()
        port = self._start()
        self.environment["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        try:
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> int:
        environment = dict(self.environment)
        environment.pop("RAY_ADDRESS", None)
        port, client_port, agent_port, agent_grpc, runtime_env_port, metrics_port = _free_ports(6)
        command = [
            str(Path(sys.executable).parent / "ray"),
            "start",
            "--head",
            "--block",
            "--node-ip-address=127.0.0.1",
            f"--port={port}",
            f"--ray-client-server-port={client_port}",
            f"--dashboard-agent-listen-port={agent_port}",
            f"--dashboard-agent-grpc-port={agent_grpc}",
            f"--runtime-env-agent-port={runtime_env_port}",
            f"--metrics-export-port={metrics_port}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--temp-dir={self.temp_dir}",
            f"--num-cpus={self.num_cpus}",
            "--num-gpus=0",
            "--include-dashboard=false",
            "--disable-usage-stats",
            f"--object-store-memory={200 * 2**20}",
        ]
        with (self.temp_dir / "ray-start.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return port

    def _wait_until_up(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        status = [str(Path(sys.executable).parent / "ray"), "status"]
        while time.monotonic() < deadline and self._process.poll() is None:
            # `ray status` takes a second and succeeds before there is a node; the raylet's socket comes last.
            if not any(self.temp_dir.glob("session_2*/sockets/raylet")):
                time.sleep(0.1)
                continue
            answer = subprocess.run(
                status, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
            )
            if answer.returncode == 0:
                return
        log = (self.temp_dir / "ray-start.log").read_text(errors="replace")
        raise RuntimeError(f"Ray did not come up within {START_TIMEOUT_S:.0f} s:\n{log[-2000:]}")

    def stop(self) -> None:
        """End every process of the cluster and remove its folder; calling it twice does no harm."""
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop_family(psutil.Process(self._process.pid), STOP_TIMEOUT_S)
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None
        if self._private_dir:
            shutil.rmtree(self._private_dir, ignore_errors=True)

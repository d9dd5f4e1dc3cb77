"""Our own MPS control daemon: one per run, started and ended with it, asked one question at a time.

    start > [server starts with the first client] > servers, clients, status > quit

The daemon is known by its PID with its start time. Questions go through the `nvidia-cuda-mps-control` binary, which
reads a command from its input; they are serialised, since concurrent ones fail at times, and bounded, since
one may hang.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.errors import PlacementError
from mps_trainer.mps.environment import daemon_env
from mps_trainer.mps.folder import MpsFolder
from mps_trainer.run import HeldLock, try_hold
from mps_trainer.run.process import ProcessIdentity

CONTROL_BINARY = "nvidia-cuda-mps-control"
_PID_FILE = "nvidia-cuda-mps-control.pid"
_POLL_S = 0.05


@dataclass(frozen=True)
class MpsClient:
    """A process that works through a server of the daemon.

    Attributes:
        pid: the client's PID as the daemon's PID namespace sees it.
        server_pid: the `nvidia-cuda-mps-server` process.
        device: the GPU's UUID, possibly shortened by the daemon.
        command: what it runs, as the daemon shows it.
    """

    pid: int
    server_pid: int
    device: str
    command: str


@dataclass(frozen=True)
class GpuFault:
    """What the server's log says of a fatal GPU error.

    Attributes:
        pid: the client that caused it.
        torn_down: all clients that the server ended because of it, the one that caused it among them.
        when: the log's own time stamp.
    """

    pid: int
    torn_down: tuple[int, ...]
    when: str


class MpsDaemon:
    """The daemon of one `MpsFolder`.

    A second object on the same folder talks to the same daemon: `up` starts it, the supervisor and `doctor` ask it.
    """

    def __init__(self, folder: MpsFolder, binary: str = CONTROL_BINARY) -> None:
        self.folder = folder
        self._binary = binary
        self._started: ProcessIdentity | None = None
        self._faults: list[GpuFault] = []

    def find(self) -> ProcessIdentity | None:
        """The running daemon; None when it has not started or has ended."""
        if self._started is not None and self._started.is_running:
            return self._started
        text = _read(self.folder.pipe_dir / _PID_FILE).strip()
        found = ProcessIdentity.of(int(text)) if text.isdecimal() else None
        # The file outlives a killed daemon, and its PID may be somebody else's by now.
        if found is None or self._binary.rpartition("/")[2] not in _command_line(found.pid):
            return None
        return found if found.is_running else None

    def start(self, timeout_s: float = 10.0) -> ProcessIdentity:
        """Start the daemon and wait until it answers.

        Raises:
            PlacementError: no control binary, a path that is too long, a daemon that is there already, or one that
                does not answer; the message carries the end of control.log.
        """
        if shutil.which(self._binary) is None:
            raise PlacementError(
                f"{self._binary} is not on the PATH",
                "install the driver's MPS tools (package nvidia-compute-utils), or set mps: off",
            )
        self.folder.make()
        if self.find() is not None:
            raise PlacementError(f"an MPS daemon runs in {self.folder.pipe_dir} already", "run `mps-trainer down`")
        # A file and no pipe: the daemon keeps its output open, and a pipe would never end.
        try:
            with (self.folder.log_dir / "start.log").open("wb") as output:
                done = subprocess.run(
                    [self._binary, "-d"],
                    env=self._env(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=timeout_s,
                    check=False,
                )
            how = f"status {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            how = str(error)
        if how != "status 0" or not _wait_for(lambda: self.find() is not None, timeout_s):
            raise PlacementError(
                f"the MPS daemon did not start ({how}): {self.log_tail('start')}\n{self.log_tail('control')}",
                "run `mps-trainer doctor`; a container needs the driver's MPS tools and a local /tmp",
            )
        # Kept, because the PID file may be cleaned away while the daemon goes on.
        self._started = self.find()
        self.ask("get_server_list", timeout_s)
        found = self.find()
        if found is None:
            raise PlacementError(
                f"the MPS daemon ended at once\n{self.log_tail('control')}", "run `mps-trainer doctor`"
            )
        return found

    def ask(self, command: str, timeout_s: float = 5.0) -> str:
        """Send one command and return what the daemon prints.

        Raises:
            PlacementError: no answer within `timeout_s`, or the daemon, its folder or its binary is gone.
        """
        deadline = time.monotonic() + timeout_s
        lock = self._try_hold(command)
        while lock is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            lock = self._try_hold(command)
        if lock is None:
            raise PlacementError(
                f"another question to the MPS daemon took over {timeout_s:.0f} s", "try again; see `mps-trainer doctor`"
            )
        with lock:
            return self._ask(command, max(0.5, deadline - time.monotonic()))

    def servers(self) -> list[int]:
        """PIDs of the daemon's servers: none before the first client, at most one for one user."""
        return [int(word) for word in self.ask("get_server_list").split() if word.isdecimal()]

    def server_status(self, server_pid: int) -> str:
        """ACTIVE, FAULT, INITIALIZING, or what else the daemon says."""
        return self.ask(f"get_server_status {server_pid}").strip()

    def clients(self) -> list[MpsClient]:
        """Every process that works through this daemon now."""
        return parse_clients(self.ask("ps"))

    def is_client(self, pid: int) -> bool:
        """Whether `pid` is a client now: the proof that a process joined."""
        return any(client.pid == pid for client in self.clients())

    def faults(self) -> list[GpuFault]:
        """Fatal GPU errors since the daemon started, oldest first."""
        # What was once in a log that cannot be read now has happened all the same.
        self._faults = parse_faults(_read(self.folder.log_dir / "server.log")) or self._faults
        return self._faults

    def quit(self, timeout_s: float = 10.0, *, force_after_s: int | None = None) -> bool:
        """End the daemon and its servers and delete the folder; whether it ended within `timeout_s`.

        Without `force_after_s` a server goes on until its last client has ended. Forcing is only for clients that
        are known to be idle or dead: what a busy one has queued may take its neighbours along.
        """
        found = self.find()
        if found is not None:
            words = "quit" if force_after_s is None else f"quit -t {force_after_s}"
            try:
                self.ask(words, timeout_s)
            except PlacementError:
                if (self.folder.pipe_dir / _PID_FILE).exists() and found.is_running:
                    return False
                # Somebody has cleaned its files away: no question reaches it any more, a signal does.
                found.send(signal.SIGTERM)
            if not found.wait(timeout_s):
                return False
        self.folder.remove()
        return True

    def log_tail(self, name: str, num_lines: int = 20) -> str:
        """The last lines of control.log or server.log; empty when there is none."""
        return "\n".join(_read(self.folder.log_dir / f"{name}.log").splitlines()[-num_lines:])

    def _try_hold(self, command: str) -> HeldLock | None:
        try:
            return try_hold(self.folder.control_lock, f"pid {os.getpid()}: {command}")
        except OSError as error:
            raise PlacementError(
                f"cannot ask the MPS daemon: {self.folder.control_lock}: {error.strerror}",
                "did somebody clean its folder away? `mps-trainer down`, then start again",
            ) from None

    def _ask(self, command: str, timeout_s: float) -> str:
        try:
            done = subprocess.run(
                [self._binary],
                env=self._env(),
                input=command + "\n",
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except OSError as error:
            raise PlacementError(
                f"cannot ask the MPS daemon: {self._binary}: {error.strerror}",
                "see that the driver's MPS tools are there, and `ulimit -n` and the memory of this machine",
            ) from None
        except subprocess.TimeoutExpired:
            raise PlacementError(
                f"the MPS daemon did not answer {command!r} within {timeout_s:.1f} s",
                "its server may hang: `mps-trainer down`, then start again",
            ) from None
        if done.returncode:
            said = (done.stdout + done.stderr).strip()
            raise PlacementError(
                f"the MPS daemon in {self.folder.pipe_dir} refused {command!r}: {said}",
                "it may have ended: `mps-trainer status` tells",
            )
        return done.stdout

    def _env(self) -> dict[str, str]:
        return daemon_env(os.environ, self.folder.pipe_dir, self.folder.log_dir)


def parse_clients(text: str) -> list[MpsClient]:
    """Clients from the daemon's `ps`, a table with a heading. Lines that are none are skipped."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    heading = next((i for i, words in enumerate(lines) if {"PID", "SERVER", "DEVICE"} <= set(words)), None)
    if heading is None:
        return []
    at = {name: i for i, name in enumerate(lines[heading])}
    rows = [
        words
        for words in lines[heading + 1 :]
        if len(words) >= len(at) - 1 and words[at["PID"]].isdecimal() and words[at["SERVER"]].isdecimal()
    ]
    # A client that is just ending has no command any more (seen on an H200, driver 580).
    command = at.get("COMMAND", -1)
    return [
        MpsClient(
            int(words[at["PID"]]), int(words[at["SERVER"]]), words[at["DEVICE"]],
            words[command] if command < len(words) else "",
        )
        for words in rows
    ]  # fmt: skip


_FAULT = re.compile(r"\[(?P<when>[^\]]+?) Server +\d+\] Client \{PID: (?P<pid>\d+), .*encountered a fatal GPU error")
_TORN_DOWN = re.compile(r"Client \{PID: (\d+), .*to be torn down")


def parse_faults(server_log: str) -> list[GpuFault]:
    """Fatal GPU errors from server.log."""
    found: list[GpuFault] = []
    for line in server_log.splitlines():
        culprit = _FAULT.search(line)
        victim = _TORN_DOWN.search(line)
        if culprit:
            found.append(GpuFault(int(culprit["pid"]), (), culprit["when"]))
        elif victim and found and int(victim[1]) not in found[-1].torn_down:
            last = found[-1]
            found[-1] = GpuFault(last.pid, (*last.torn_down, int(victim[1])), last.when)
    return found


def _command_line(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    # The daemon detaches itself and has no way to tell that it is up; only asking tells.
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True

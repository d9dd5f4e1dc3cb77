"""Start and end processes of our own, and never anybody else's.

A PID alone may be somebody else's by now, so a process is its PID with its start time. The order of an end is
always the same: SIGTERM and time to drain; then SIGSTOP and time for work in flight on a GPU to finish, since a
client of MPS that dies with work in flight takes its neighbours along; SIGKILL last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path

from mps_trainer.run.process import ProcessIdentity

GPU_DRAIN_SECONDS = 2.5  # by then a stopped process has no kernels left on the device
#: SIGKILL takes effect at once, except on a process that a driver holds in the kernel.
KILL_SECONDS = 10.0


class Ended(str, Enum):
    """How a process ended that we asked to end."""

    ALREADY = "already gone"
    BY_ITSELF = "ended when asked"
    KILLED = "killed after it did not end in time"
    STILL_ALIVE = "still alive"


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path | int,
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
    dies_with_us: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, stdin closed, stdout and stderr appended to `log`.

    Args:
        log: a file to append to, or a descriptor such as `subprocess.PIPE`.
        dies_with_us: the kernel sends it SIGTERM when this process dies, whatever the reason.
    """
    if dies_with_us:
        command = [sys.executable, "-m", "mps_trainer.launcher.tied", str(os.getpid()), "--", *command]
    output = (
        os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600) if isinstance(log, Path) else log
    )
    try:
        return subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
    finally:
        if isinstance(log, Path):
            os.close(output)


def stop(
    child: subprocess.Popen[bytes],
    *,
    grace_s: float,
    gpu_drain_s: float = 0.0,
    more_s: Callable[[], float] = lambda: 0.0,
) -> Ended:
    """End our own child in the order that the module names; at most the times given and a moment.

    Args:
        grace_s: after SIGTERM.
        gpu_drain_s: after SIGSTOP; 0 for one without a GPU, which is not stopped.
        more_s: asked when `grace_s` is over: how many seconds more it deserves.
    """
    if child.poll() is not None:
        return Ended.ALREADY
    child.send_signal(signal.SIGTERM)
    # A child that somebody stopped cannot act on SIGTERM.
    child.send_signal(signal.SIGCONT)
    if wait_for_exit(child, grace_s) is not None:
        return Ended.BY_ITSELF
    if (longer := more_s()) > 0 and wait_for_exit(child, longer) is not None:
        return Ended.BY_ITSELF
    if gpu_drain_s:
        child.send_signal(signal.SIGSTOP)
        wait_for_exit(child, gpu_drain_s)
    child.kill()
    return Ended.STILL_ALIVE if wait_for_exit(child, KILL_SECONDS) is None else Ended.KILLED


def wait_for_exit(child: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code of our own child, as subprocess gives it; None while it is still there after the time."""
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def held_by_driver(pid: int) -> tuple[str, str]:
    """What to say of a process that outlives SIGKILL, and what to do."""
    return (
        f"process {pid} is still there {KILL_SECONDS:.0f} s after SIGKILL: the kernel does not let it go, and on a GPU "
        "that is the driver",
        "look for Xid errors in `dmesg`; it ends when the driver lets it go, else whoever runs the machine has to "
        "reset the GPU or restart it",
    )


def stop_identity(process: ProcessIdentity, *, grace_s: float) -> Ended:
    """Ask a process that is not our child to end, with SIGTERM and no harder signal, and wait for it."""
    if not process.send(signal.SIGTERM):
        return Ended.ALREADY
    # A process that somebody stopped cannot act on SIGTERM.
    process.send(signal.SIGCONT)
    return Ended.BY_ITSELF if process.wait(grace_s) else Ended.STILL_ALIVE


def describe_exit(return_code: int) -> str:
    """ "exit code 3", or "signal SIGKILL" for the negative codes of subprocess."""
    if return_code >= 0:
        return f"exit code {return_code}"
    try:
        return f"signal {signal.Signals(-return_code).name}"
    except ValueError:
        return f"signal {-return_code}"

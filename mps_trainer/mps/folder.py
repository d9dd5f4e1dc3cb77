"""Where one run keeps what belongs to MPS: `<state folder>/mps/<run_id>/`.

pipe/           the daemon's sockets and PID file (CUDA_MPS_PIPE_DIRECTORY)
log/            control.log and server.log (CUDA_MPS_LOG_DIRECTORY)
control.lock    serialises questions to the daemon
summons         the socket on which a vLLM engine asks whether it shall join
pause           while it is there the sidecar launches nothing; it holds the reason
utilization     what NVML says of the GPU, for the pace of a run that hears of no engine (`utilization.py`)
hold            while it is there the sidecar does not end for idling: an engine is measuring memory
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mps_trainer.errors import PlacementError
from mps_trainer.run import STATE_DIR_VARIABLE, state_dir
from mps_trainer.run.private_files import write_private

log = logging.getLogger("mps_trainer.supervisor")

# sun_path holds 108 bytes with its final zero; the daemon's longest socket name is "control_privileged".
MAX_SOCKET_PATH = 107
_LONGEST_SOCKET = "control_privileged"


@dataclass(frozen=True)
class MpsFolder:
    """The paths of one run's MPS daemon. Nothing is made before `make`."""

    path: Path
    _told: set[str | None] = field(default_factory=set, init=False, repr=False, compare=False)

    @property
    def pipe_dir(self) -> Path:
        """What daemon and clients find each other by."""
        return self.path / "pipe"

    @property
    def log_dir(self) -> Path:
        """Where control.log and server.log go."""
        return self.path / "log"

    @property
    def control_lock(self) -> Path:
        """Held while a question is put to the daemon."""
        return self.path / "control.lock"

    @property
    def summons_socket(self) -> Path:
        """Where engines of the run announce themselves."""
        return self.path / "summons"

    @property
    def pause_file(self) -> Path:
        """Written by the supervisor, looked for by the sidecar between steps."""
        return self.path / "pause"

    def set_pause(self, reason: str) -> bool:
        """Pause the sidecar, or with "" let it go on; called often, and does nothing when nothing changes.

        False when the folder is gone or the disk refuses: then it stays as it was, and the log has it once.
        """
        try:
            if not reason:
                self.pause_file.unlink(missing_ok=True)
            elif self._pause_reason() != reason:
                write_private(self.pause_file, reason)
        except OSError as error:
            if error.strerror not in self._told:
                log.error("cannot %s the sidecar: %s: %s", "pause" if reason else "resume", self.path, error.strerror)
                self._told.add(error.strerror)
            return False
        self._told.clear()
        return True

    def _pause_reason(self) -> str:
        try:
            return self.pause_file.read_text()
        except FileNotFoundError:
            return ""

    @property
    def hold_file(self) -> Path:
        """As the pause file; an operator follows the engine that starts."""
        return self.path / "hold"

    def set_hold(self, on: bool) -> None:
        """Keep the sidecar from idling out, or no longer. Does nothing when nothing changes."""
        # A disk that refuses costs this protection and nothing else.
        with contextlib.suppress(OSError):
            if not on:
                self.hold_file.unlink(missing_ok=True)
            elif not self.hold_file.exists():
                self.hold_file.touch(0o600)

    @property
    def longest_socket_path(self) -> int:
        """Bytes of the longest socket path in the folder."""
        return len(str(self.pipe_dir / _LONGEST_SOCKET).encode())

    def make(self) -> None:
        """Create the folders, 0700; PlacementError when a socket path would be too long."""
        if self.longest_socket_path > MAX_SOCKET_PATH:
            raise PlacementError(
                f"the MPS pipe directory {self.pipe_dir} is too long: a socket in it needs "
                f"{self.longest_socket_path} bytes, Linux allows {MAX_SOCKET_PATH}",
                f"set {STATE_DIR_VARIABLE} to a short local folder, such as /tmp/mt",
            )
        for path in (self.path.parent, self.path, self.pipe_dir, self.log_dir):
            path.mkdir(mode=0o700, exist_ok=True)

    def remove(self) -> None:
        """Delete the folder. Only for a daemon that has ended."""
        shutil.rmtree(self.path, ignore_errors=True)


def mps_folder(run_id: str) -> MpsFolder:
    """The folder of the run `run_id`."""
    return MpsFolder(state_dir() / "mps" / run_id)


def all_mps_folders() -> Iterator[tuple[str, MpsFolder]]:
    """(run id, folder) of every run of this user that has left one."""
    root = state_dir() / "mps"
    if root.is_dir():
        for path in sorted(root.iterdir()):
            yield path.name, MpsFolder(path)

"""Processes by identity: a PID alone is reused, a PID with its start time is not.

What /proc does not show us (a process of somebody else under `hidepid`) counts as not there: ours are always shown.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ENDED = ("Z", "X")


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of this boot.

    Attributes:
        pid: its PID, as this process's PID namespace sees it.
        start_ticks: its start in clock ticks since boot (field 22 of /proc/<pid>/stat).
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process that has `pid` now; None when there is none, or only a zombie."""
        fields = _stat_fields(pid)
        return None if fields is None or fields[0] in _ENDED else cls(pid, int(fields[19]))

    @property
    def is_running(self) -> bool:
        """Whether it still exists and is no zombie."""
        fields = _stat_fields(self.pid)
        return fields is not None and int(fields[19]) == self.start_ticks and fields[0] not in _ENDED

    @property
    def state(self) -> str:
        """One letter of /proc: R running, S sleeping, T stopped, D in the kernel, Z zombie; "" when it is gone."""
        fields = _stat_fields(self.pid)
        return fields[0] if fields is not None and int(fields[19]) == self.start_ticks else ""

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, at most `timeout_s`; whether it has."""
        descriptor = self._open()
        if descriptor is None:
            return True
        try:
            return bool(select.select([descriptor], [], [], max(timeout_s, 0.0))[0])
        finally:
            os.close(descriptor)

    def send(self, signal_number: int) -> bool:
        """Send a signal to exactly this process; False when it is gone."""
        descriptor = self._open()
        if descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(descriptor, signal_number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _open(self) -> int | None:
        # The descriptor pins the process; the start time is compared after it is pinned, so no reuse can slip in.
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.is_running:
            return descriptor
        os.close(descriptor)
        return None


def ancestors(pid: int) -> Iterator[int]:
    """The PIDs above `pid`, nearest first, up to init."""
    seen = {pid}
    while True:
        fields = _stat_fields(pid)
        if fields is None:
            return
        pid = int(fields[1])
        if pid <= 0 or pid in seen:
            return
        seen.add(pid)
        yield pid


def is_descendant(pid: int, ancestor: int) -> bool:
    """Whether `pid` is `ancestor` or was started by it, directly or not."""
    return pid == ancestor or ancestor in ancestors(pid)


def _stat_fields(pid: int) -> list[str] | None:
    # Bytes: a process may give itself a name that is no text.
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command name stands in parentheses and may hold spaces and parentheses itself.
    return stat.rpartition(b")")[2].decode("ascii").split()


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

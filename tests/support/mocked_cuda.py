"""A driver for machines without a GPU: it remembers what it was asked for, in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TextIO


def is_mapped(address: int) -> bool:
    """Whether this process has memory there, as the kernel says."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


class MockedCuda:
    """Answers each registration with `status`; `on_synchronize` stands for the time that copies take.

    Attributes:
        calls: names of the calls in order, "register" and "unregister" with the address behind them.
        sizes: bytes by address, of the accepted registrations that were not undone.
        pending: copies were started and not waited for.
    """

    def __init__(self, status: int = 0, log: TextIO | None = None) -> None:
        self.status = status
        self.calls: list[str | tuple[str, int]] = []
        self.sizes: dict[int, int] = {}
        self.pending = False
        self.on_synchronize: Callable[[], None] = lambda: None
        self._log = log

    def register(self, address: int, num_bytes: int) -> int:
        assert address not in self.sizes
        assert is_mapped(address)
        assert is_mapped(address + num_bytes - 1)
        self._note(("register", address))
        if self.status == 0:
            self.sizes[address] = num_bytes
        return self.status

    def unregister(self, address: int) -> int:
        assert is_mapped(address), "unmapped before it was unregistered"
        assert not self.pending, "unregistered with copies under way"
        del self.sizes[address]
        self._note(("unregister", address))
        return 0

    def record(self) -> None:
        self.pending = True
        self.calls.append("record")

    def synchronize(self) -> None:
        self.on_synchronize()
        self.pending = False
        self.calls.append("synchronize")

    def addresses(self, name: str) -> list[int]:
        return [call[1] for call in self.calls if call[0] == name and not isinstance(call, str)]

    def _note(self, call: tuple[str, int]) -> None:
        self.calls.append(call)
        if self._log is not None:
            print(f"mocked driver: {call[0]} {call[1]:#x}", file=self._log, flush=True)

"""What the tests of MPS share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
FAKE_CONTROL = HERE / "fake_control"


def recorded(name: str) -> str:
    """Text that the real thing once said."""
    return (HERE / "recorded" / name).read_text()


def wait_for(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Poll until `condition` holds; fails after the limit."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

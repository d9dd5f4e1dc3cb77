"""Copies between memory and the file of a snapshot of weights, in parts between which a reader looks at the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from mps_trainer.errors import TransportError


def pieces(view: memoryview, offset: int) -> Iterator[tuple[memoryview, int]]:
    """(part, its place in the file) of a copy."""
    # One call moves at most 2 GiB, and a reader looks at the clock between two: this takes it some 10 ms.
    step = 2**26
    for at in range(0, view.nbytes, step):
        yield view[at : at + step], offset + at


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`."""
    for piece, at in pieces(view, offset):
        while piece.nbytes:
            count = os.pwrite(descriptor, piece, at)
            piece, at = piece[count:], at + count


def check_time(deadline: float) -> None:
    """TransportError once `deadline` (monotonic seconds) is over."""
    if time.monotonic() >= deadline:
        raise TransportError("the snapshot of weights was not copied in time", "raise score_timeout")


def read_all(descriptor: int, view: memoryview, offset: int, deadline: float) -> bool:
    """Fill `view`; False when the file ends before. TransportError when the time is over."""
    for piece, at in pieces(view, offset):
        check_time(deadline)
        while piece.nbytes:
            count = os.preadv(descriptor, [piece], at)
            if not count:
                return False
            piece, at = piece[count:], at + count
    return True

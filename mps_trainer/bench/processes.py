"""The processes of an engine or a trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import psutil


def process_tree(pids: Sequence[int]) -> list[psutil.Process]:
    """The processes and all their descendants that live."""
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found

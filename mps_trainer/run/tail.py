"""Following a file of JSON lines that somebody else appends to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Line = dict[str, Any]

#: What a look reads at most: some hundred batches, in milliseconds, however long the run is or nobody looked.
_MOST_BYTES = 2**18


class Tail:
    """The new whole lines of a file at each `read`; the first one, and one after much growth, starts near its end.

    Args:
        path: need not exist yet.
        most: bytes that one read takes, from the end of the file; what is before them is passed over.
    """

    def __init__(self, path: Path, most: int = _MOST_BYTES) -> None:
        self._path = path
        self._most = most
        self._at = 0

    def read(self) -> list[Line]:
        """JSON objects since the last call, in order; what is none, or cannot be read, is left out."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._at:
                    self._at = 0
                # The line that a look in the middle begins with is half a line.
                torn = size - self._at > self._most
                if torn:
                    self._at = size - self._most
                file.seek(self._at)
                chunk = file.read(size - self._at)
        except OSError:
            return []
        whole, newline, _ = chunk.rpartition(b"\n")
        self._at += len(whole) + len(newline)
        lines = whole.split(b"\n")[1 if torn else 0 :]
        return [line for line in map(parse_line, lines) if isinstance(line, dict)]


def parse_line(text: str | bytes) -> Any:
    """The JSON value of a line; None when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def number_in(line: Line, name: str) -> float | None:
    """The number of that name; None when there is none, or it is out of all range."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 2**63 or not math.isfinite(value):
        return None
    return float(value)

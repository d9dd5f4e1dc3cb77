"""Following a file of JSON lines that somebody else appends to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]

#: What a first look reads at most: some hundred batches, in milliseconds, however long the run is.
_FIRST_LOOK_BYTES = 2**18


class Tail:
    """The new whole lines of a file at each `read`; the first one starts near its end.

    Args:
        path: need not exist yet.
        first_look: bytes that the first read takes from the end of the file.
    """

    def __init__(self, path: Path, first_look: int = _FIRST_LOOK_BYTES) -> None:
        self._path = path
        self._first_look = first_look
        self._at: int | None = None

    def read(self) -> list[Line]:
        """JSON objects since the last call, in order; what is none, or cannot be read, is left out."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                torn = False
                if self._at is None or size < self._at:
                    # The line that a look in the middle begins with is half a line.
                    self._at, torn = max(0, size - self._first_look), size > self._first_look
                file.seek(self._at)
                chunk = file.read(size - self._at)
        except OSError:
            return []
        whole, newline, _ = chunk.rpartition(b"\n")
        self._at += len(whole) + len(newline)
        lines = whole.split(b"\n")[1 if torn else 0 :]
        return [line for line in map(_parse, lines) if isinstance(line, dict)]


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

"""How long each part of a start took: one line in the log and `startup.json` in the run folder."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from mps_trainer.run.private_files import write_private

_log = logging.getLogger(__name__)


class Phases:
    """A stopwatch with laps. The start of the interpreter, a tenth of a second, comes before it.

    Args:
        begin: `time.monotonic()` before the imports.
    """

    def __init__(self, begin: float) -> None:
        self._seconds: dict[str, float] = {}
        self._waited_s: float | None = None
        self._before = 0.0
        self._last = begin

    def lap(self, name: str) -> None:
        """What has passed since the last lap was this; a name that comes twice adds up."""
        self._seconds[name] = self._seconds.get(name, 0.0) + self._passed()

    def waited(self) -> None:
        """What has passed since the last lap was waiting for an engine, which is no part of the start."""
        self._waited_s = self._passed()
        self._before = sum(self._seconds.values())

    def ready(self, run_dir: Path) -> None:
        """The start is over: log it and write `startup.json`.

        {"ready_s": of work, "waited_s": for an engine or null, "summons_to_ready_s": or null, "phases_s": {...}}
        """
        self.lap("rest")
        total = sum(self._seconds.values())
        after = None if self._waited_s is None else total - self._before
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        waited = (
            "" if after is None else f", {after:.1f} s of them after a wait of {self._waited_s:.1f} s for an engine"
        )
        _log.info("ready in %.1f s%s: %s", total, waited, parts)
        found = {"ready_s": total, "waited_s": self._waited_s, "summons_to_ready_s": after, "phases_s": self._seconds}
        try:
            write_private(run_dir / "startup.json", json.dumps(found, indent=1))
        except OSError as error:
            _log.warning("startup.json cannot be written: %s", error)

    def _passed(self) -> float:
        now = time.monotonic()
        passed, self._last = now - self._last, now
        return passed

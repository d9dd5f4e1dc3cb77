"""What the pace goes by, the best that there is: the engines' own word, NVML, or nothing but the arrival of batches."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from mps_trainer.errors import PlacementError
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.mps.utilization import read_utilization
from mps_trainer.run import RunRecord
from mps_trainer.run.engine_load import EngineLoad, LoadReader

_log = logging.getLogger(__name__)
_FIND_S = 2.0
#: An engine that had requests and says nothing for so long is not believed any more: other signs count then.
_LOST_S = 30.0
#: NVML tells of the second before; our own steps in it would look like somebody else's.
_NVML_LOOKS_BACK_S = 1.0
_NVML_OLD_S = 4.0
#: Idle by NVML is believed for so long without another low sample, since our own steps hide an engine that wakes up.
_IDLE_HOLDS_S = 10.0
#: Percent below which a GPU does nothing for anybody.
_IDLE_PERCENT = 10


@dataclass(frozen=True)
class Sight:
    """One look.

    Attributes:
        source: "engine", "nvml", "arrivals", or "none": there is no engine that we share anything with.
        load: with "engine".
        busy: without a load: whether the GPU computes for others; None: nobody can say now.
    """

    source: str
    load: EngineLoad | None = None
    busy: bool | None = None


class Source:
    """Looks at the files of engines and of the supervisor.

    Args:
        silent_s: an engine that says nothing for so long counts as idle.
    """

    def __init__(self, record: RunRecord, silent_s: float = 1.0) -> None:
        self._silent_s = silent_s
        self._folder = mps_folder(record.run_id)
        self._reader = LoadReader(Path(record.run_dir), _gpu_of(record))
        self._found_at = self._nvml_at = -_FIND_S
        self._nvml: tuple[float, float] | None = None
        self._was_busy: bool | None = None
        self._idle_at = 0.0
        self._shares, self._heard = record.mps == "on", False

    def look(self, now: float, last_step: float, silent_s: float | None = None) -> Sight:
        """As it is now; a few microseconds.

        Args:
            now: of `time.monotonic()`.
            last_step: when our last step ended.
            silent_s: another patience than that of the settings: the engine's own iterations may take longer.
        """
        if now - self._found_at >= _FIND_S:
            self._found_at = now
            self._reader.find()
            self._heard = self._heard or self._reader.knows_any
        load = self._reader.read(max(self._silent_s, silent_s or 0.0), _LOST_S)
        if load is not None:
            return Sight("engine", load)
        if now - self._nvml_at >= _NVML_LOOKS_BACK_S / 4:
            self._nvml_at = now
            self._nvml = read_utilization(self._folder)
        if self._nvml is None or now - self._nvml[0] > _NVML_OLD_S:
            self._was_busy = None
            return Sight("arrivals") if self._shares or self._heard else Sight("none", busy=False)
        at, percent = self._nvml
        if percent < _IDLE_PERCENT:
            # Low even with our own steps in it.
            self._was_busy, self._idle_at = False, now
        elif at - last_step >= _NVML_LOOKS_BACK_S:
            self._was_busy = True
        elif self._was_busy is False and max(now - at, now - self._idle_at - _IDLE_HOLDS_S) > _NVML_LOOKS_BACK_S:
            self._was_busy = None
        return Sight("nvml", busy=self._was_busy)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def _gpu_of(record: RunRecord) -> str:
    if record.mps != "on":
        return ""
    try:
        return GpuPlacement.load(mps_folder(record.run_id)).gpu_uuid
    except (PlacementError, OSError, json.JSONDecodeError) as error:
        _log.warning("the pace listens to every engine of the run: %s", error)
        return ""


def now() -> float:
    """Seconds of CLOCK_MONOTONIC, which engines use too."""
    return time.monotonic()

"""TensorBoard event files, written without the thread and the imports of torch.utils.tensorboard."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class EventFile:
    """One event file of scalars in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, wall_time: float, step: int, values: dict[str, Any]) -> None:
        """Every number of `values`, under the tag sidecar/<name>; the task's own under sidecar/task/<name>."""
        values = {**values, **{f"task/{name}": value for name, value in (values.get("task") or {}).items()}}
        summary = [
            Summary.Value(tag=f"sidecar/{name}", simple_value=float(value))
            for name, value in values.items()
            if isinstance(value, (int, float)) and name != "step"
        ]
        self._append(Event(wall_time=wall_time, step=step, summary=Summary(value=summary)))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _append(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

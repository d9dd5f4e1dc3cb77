"""A recording: the experiences that an operator saw, as JSON lines, and the way back to experiences.

consumes    batches of Trinity `Experience` objects, before scores change any reward (read only)
produces    a file of one line for each experience; `read_recording` turns it into what `Extractor` takes
waits for   the disk; so it runs in the operator's thread

A line holds what a task's column may read: `eid`, tokens, logprobs, reward, info, metrics, texts. Tensors are lists,
what is None is left out, and so is what JSON cannot hold (counted). `batch` is the same number for all experiences of
one call, and grows: the columns batch.reward_mean and group.reward_mean look at whole batches.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from mps_trainer.errors import ExperienceError
from mps_trainer.operator.extract import ExperienceLike, to_numpy

logger = logging.getLogger(__name__)

#: A recording must not fill the disk that the rollout's checkpoints need.
MOST_BYTES = 2**30
_EID_KEYS = ("batch", "task", "run", "step", "suffix")
_SHORT_FLOATS = (np.dtype("float16"), np.dtype("float32"))
_NOT_WRITABLE = (TypeError, ValueError, RuntimeError, RecursionError)


@dataclass(frozen=True)
class RecordedId:
    """The part of Trinity's `EID` that names an experience (`uid`) and its task (`tid`)."""

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = ""

    @property
    def uid(self) -> str:
        """Unique for an experience."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        """The same for all runs of a task at one step."""
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        """The same for all steps of a run."""
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        """The same for all runs of a task: the group."""
        return f"{self.batch}/{self.task}"


@dataclass(kw_only=True)
class RecordedExperience:
    """An experience as an operator sees it, without Trinity: from a recording, or made up for a test.

    Sequences are arrays or lists; `tokens` holds the prompt (`prompt_length` of them) and then the response.
    `advantages` and `returns` are None, as they are in an operator.
    """

    eid: RecordedId
    tokens: Any
    prompt_length: int = 1
    logprobs: Any = None
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    token_level_reward: Any = None
    action_mask: Any = None
    teacher_logprobs: Any = None
    truncate_status: str | None = None
    response_text: str | None = None
    prompt_text: str | None = None
    advantages: None = None
    returns: None = None


_FIELDS = tuple(f.name for f in fields(RecordedExperience) if f.name not in ("eid", "info", "metrics"))


class Recorder:
    """Appends batches to a file, up to `most` experiences and `MOST_BYTES`. Not thread-safe.

    What goes wrong is counted, never raised: a recording is no reason to lose a batch.
    """

    def __init__(self, path: Path, most: int) -> None:
        self._path = path
        self._most = most
        self._descriptor: int | None = None
        self._count = 0
        self._bytes = 0
        self._num_errors = 0
        self._num_left_out = 0
        self._full = False

    def add(self, experiences: Sequence[ExperienceLike]) -> dict[str, int | float]:
        """Append a batch; metrics: experiences in the file, values and experiences that could not be written, time."""
        begin = time.monotonic()
        if not self._full:
            try:
                self._append(experiences)
            except Exception as error:  # noqa: BLE001  # the rollout comes first: the disk is full, a field is odd
                self._num_errors += 1
                if self._num_errors == 1:
                    logger.warning("mps_trainer: %s cannot be recorded to: %s", self._path, error)
        return {
            "recorded": self._count,
            "record_left_out_total": self._num_left_out,
            "record_errors_total": self._num_errors,
            "record_ms": (time.monotonic() - begin) * 1e3,
        }

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, experiences: Sequence[ExperienceLike]) -> None:
        descriptor = self._open() if self._descriptor is None else self._descriptor
        batch = time.time_ns()
        for experience in experiences:
            if self._count >= self._most or self._bytes >= MOST_BYTES:
                self._full = True
                logger.info("mps_trainer: %s holds %d experiences: recording ends", self._path, self._count)
                return
            line, left_out = experience_line(experience, batch)
            self._num_left_out += left_out
            # One write for a line: whatever kills us leaves whole lines, and at most one torn at the end.
            written = os.write(descriptor, line)
            self._bytes += written
            if written < len(line):
                raise OSError("the disk is full")
            self._count += 1

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # 0600: it holds prompts and responses. O_NONBLOCK: opening a FIFO must not wait for its reader.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            # A pipe or a device may never end, and what is there is counted first.
            os.close(descriptor)
            raise OSError("it is no regular file")
        self._descriptor = descriptor
        with self._path.open("rb") as file:
            last = b"\n"
            while chunk := file.read(2**20):
                self._count += chunk.count(b"\n")
                self._bytes += len(chunk)
                last = chunk[-1:]
        if last != b"\n":
            os.write(descriptor, b"\n")
        return descriptor


def experience_line(experience: ExperienceLike, batch: int) -> tuple[bytes, int]:
    """The line of an experience, and how many of its values JSON cannot hold."""
    eid = {key: getattr(experience.eid, key) for key in _EID_KEYS}
    parts = [f'"batch": {batch}', f'"eid": {json.dumps(eid)}']
    left_out = 0
    values = {name: getattr(experience, name, None) for name in _FIELDS}
    texts, failed = _texts(values)
    left_out += failed
    parts += [f'"{name}": {text}' for name, text in texts.items()]
    for name, held in (("info", experience.info), ("metrics", experience.metrics)):
        texts, failed = _texts(held or {})
        left_out += failed
        if texts:
            parts.append(f'"{name}": {{{", ".join(f"{json.dumps(key)}: {text}" for key, text in texts.items())}}}')
    return f"{{{', '.join(parts)}}}\n".encode(), left_out


def _texts(values: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    texts: dict[str, str] = {}
    failed = 0
    for key, value in values.items():
        if value is None:
            continue
        try:
            texts[str(key)] = _text(value)
        except _NOT_WRITABLE:  # one odd value costs itself only
            failed += 1
    return texts, failed


def _text(value: Any) -> str:
    if hasattr(value, "detach"):
        value = to_numpy(value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype in _SHORT_FLOATS and np.isfinite(value).all():
        # Nine digits give a float32 back exactly. json.dumps would write seventeen, in more than twice the time.
        numbers = value.tolist()
        return f"[{','.join(['%.9g'] * len(numbers)) % tuple(numbers)}]"
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "detach") or isinstance(value, np.ndarray):
        return to_numpy(value).tolist()
    raise TypeError(f"{type(value).__name__} is nothing for JSON")


@dataclass(frozen=True)
class Recording:
    """What a file holds.

    Attributes:
        batches: the experiences of each call, in their order.
        broken: lines that are no experience, such as one torn by a kill.
    """

    batches: list[list[RecordedExperience]]
    broken: int = 0

    @property
    def size(self) -> int:
        """Experiences in all."""
        return sum(len(batch) for batch in self.batches)


def read_recording(path: Path) -> Recording:
    """Read a recording; ExperienceError when the file cannot be read or holds no experience."""
    todo = "record one: mps-trainer record trinity.yaml --to FILE"
    found: list[tuple[int, RecordedExperience]] = []
    broken = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    try:
                        found.append(_experience(line))
                    except (ValueError, TypeError, KeyError, AttributeError):
                        broken += 1
    except OSError as error:
        raise ExperienceError(f"cannot read {path}: {error.strerror}", todo) from None
    if not found:
        raise ExperienceError(f"{path} holds no experience ({broken} lines are none)", todo)
    groups = itertools.groupby(found, key=lambda item: item[0])
    return Recording([[experience for _, experience in group] for _, group in groups], broken)


def _experience(line: bytes) -> tuple[int, RecordedExperience]:
    row = json.loads(line)
    values = {name: _compact(row[name]) for name in _FIELDS if name in row}
    info = {key: _compact(value) for key, value in row.get("info", {}).items()}
    eid = RecordedId(**row["eid"])
    return int(row.get("batch", 0)), RecordedExperience(
        eid=eid, info=info, metrics=dict(row.get("metrics", {})), **values
    )


def _compact(value: Any) -> Any:
    """Lists of numbers as arrays: a tenth of the memory. Anything else as it is."""
    if not isinstance(value, list) or not value or not isinstance(value[0], (int, float, list)):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        return value
    return array if array.dtype.kind in "biuf" else value

"""Experiences that killed a predecessor: taken out of training, kept, counted and named.

    supervisor: verdicts.json > here: a condemned record is not scored, journaled or taken; a condemned step's
    experiences do not come into the replay buffer, and those that a checkpoint brought leave it before any step
    > set_aside/<name>.arrow and .json > status, log

The number of the step says nothing: with a pace, or with `train: continuous`, a successor's step n has other rows. So
the ids are banned for the whole run, wherever they come from (checkpoint, journal or ring): a later life does the same,
and counts nothing twice.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from mps_trainer.columns import PackedBatch, PackedColumn
from mps_trainer.run.doing import RecordRef, describe_ids
from mps_trainer.run.private_files import make_private, write_private
from mps_trainer.run.verdicts import Verdict, load_verdicts
from mps_trainer.sidecar.learner import Learner, RecordName
from mps_trainer.sidecar.replay import ReplayBuffer

_log = logging.getLogger(__name__)


class SetAside:
    """Obeys the verdicts of a run.

    Attributes:
        count: experiences set aside over the run so far.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "set_aside"
        condemned = [verdict for verdict in load_verdicts(run_dir) if verdict.condemned]
        self._records = {v.subject.record: v for v in condemned if v.subject.record is not None}
        steps = [verdict for verdict in condemned if verdict.subject.record is None]
        self._banned = {eid.encode(): verdict for verdict in reversed(steps) for eid in verdict.subject.eids}
        notes = [_read_note(path) for path in sorted(self._folder.glob("*.json"))]
        self._kept = {eid.encode() for note in notes for eid in note.eids}
        self.count = sum(note.experiences for note in notes)
        self._looked_at = 0

    def takes(self, name: RecordName, batch: PackedBatch) -> bool:
        """Whether this record is condemned; it is kept then, and nothing else may be done with it."""
        verdict = self._records.get(reference(name))
        if verdict is None:
            return False
        self._keep(f"record-{name.channel.strip('/').replace('/', '_')}-{name.seq}-{name.sent_ns}", verdict, batch)
        return True

    def guard(self, replay: ReplayBuffer) -> SetAside:
        """From now on nothing that is banned comes in; what is in leaves before the next step. Gives itself."""
        if self._banned:
            replay.bar(self._banned, self._kept_out)
        return self

    def before_step(self, learner: Learner) -> None:
        """Take what is banned out of the replay buffer; cheap while nothing new has come in."""
        since, self._looked_at = self._looked_at, learner.replay.added
        if not self._banned or since == learner.replay.added:
            return
        found = learner.replay.held(self._banned, since)
        if not found:
            return
        known = [eid for eid in found if eid in self._kept]
        if known:
            # An earlier life has kept and counted these.
            learner.remove(known)
        self._keep_new(found, learner.remove)

    def _kept_out(self, batch: PackedBatch, places: list[int]) -> None:
        at = {batch["eid"].row(i).tobytes(): i for i in places}
        self._keep_new(list(at), lambda ids: pick_rows(batch, [at[eid] for eid in ids]))

    def _keep_new(self, found: list[bytes], rows_of: Callable[[list[bytes]], PackedBatch]) -> None:
        for verdict in dict.fromkeys(self._banned[eid] for eid in found if eid not in self._kept):
            ids = [eid for eid in found if eid not in self._kept and self._banned[eid] is verdict]
            name = f"step-{verdict.subject.step}-{zlib.crc32(' '.join(verdict.subject.eids).encode()):08x}"
            # They come in with several records, and one note tells of all.
            self._keep(name, verdict, rows_of(ids), more=True)
            self._kept.update(ids)

    def _keep(self, name: str, verdict: Verdict, rows: PackedBatch, *, more: bool = False) -> None:
        told = self._folder / f"{name}.json"
        if told.exists() and not more:
            return
        before = _read_note(told) if told.exists() else _Note()
        eids = tuple(rows["eid"].text(i) for i in range(rows.num_rows))
        facts = {
            "experiences": before.experiences + rows.num_rows,
            "stage": verdict.stage.name.lower(),
            "step": verdict.subject.step,
            "record": asdict(verdict.subject.record) if verdict.subject.record else None,
            "deaths": verdict.deaths,
            "cause": verdict.cause,
            "eids": (*before.eids, *eids),
        }
        try:
            make_private(self._folder)
            arrow = told.with_suffix(".arrow")
            write_private(arrow, to_arrow(rows, _read_rows(arrow, before.experiences)))
            # Last, because it counts: without it the rows are written again.
            write_private(told, json.dumps(facts, indent=1))
        except (OSError, pa.ArrowInvalid) as error:
            # They would kill this sidecar too: better no copy of them than no run.
            _log.error("no copy of %s can be kept: %s", name, error)
        self.count += rows.num_rows
        _log.error("set aside in %s.arrow: %s; a sidecar ended with %s", name, describe_ids(eids), verdict.cause)


def reference(name: RecordName) -> RecordRef:
    """The record as the supervisor knows it."""
    return RecordRef(name.channel, name.seq, name.request_id, name.part, name.sent_ns)


def pick_rows(batch: PackedBatch, places: list[int]) -> PackedBatch:
    """Copies of some rows, in the order of `places`."""
    columns = {}
    for name, column in batch.columns.items():
        if column.offsets is None:
            columns[name] = PackedColumn(column.values[places])
        else:
            parts = [column.row(i) for i in places]
            offsets = np.cumsum([0, *map(len, parts)]).astype(np.int32)
            columns[name] = PackedColumn(np.concatenate(parts), offsets, column.is_text)
    return PackedBatch(columns, len(places))


def to_arrow(rows: PackedBatch, before: pa.Table | None = None) -> bytes:
    """An Arrow IPC file of the rows, after those of `before`, which any reader of Arrow or Feather opens."""
    arrays = {name: _array(column, rows.num_rows) for name, column in rows.columns.items()}
    table = pa.table(arrays)
    if before is not None:
        table = pa.concat_tables([before, table])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _array(column: PackedColumn, num_rows: int) -> pa.Array:
    if column.is_text:
        return pa.array([column.text(i) for i in range(num_rows)], pa.string())
    if column.offsets is not None:
        return pa.array([column.row(i) for i in range(num_rows)], pa.list_(pa.from_numpy_dtype(column.values.dtype)))
    if column.values.ndim > 1:
        return pa.array(list(column.values), pa.list_(pa.from_numpy_dtype(column.values.dtype)))
    return pa.array(column.values)


@dataclass(frozen=True)
class _Note:
    experiences: int = 0
    eids: tuple[str, ...] = ()


def _read_rows(path: Path, count: int) -> pa.Table | None:
    if not count:
        return None
    with pa.OSFile(str(path)) as file:
        # Of rows beyond these no note tells: who wrote them was killed before.
        return pa.ipc.open_file(file).read_all().slice(0, count)


def _read_note(path: Path) -> _Note:
    try:
        facts = json.loads(path.read_text())
        return _Note(int(facts["experiences"]), tuple(map(str, facts.get("eids", ()))))
    except (OSError, ValueError, TypeError, KeyError) as error:
        # A torn note is no reason for a sidecar to end.
        _log.warning("%s cannot be read, so it is not counted: %s", path, error)
        return _Note()

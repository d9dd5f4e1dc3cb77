"""One run for each config and each Ray namespace, and one supervisor for each run.

The locks are taken by `up` before it writes anything and handed to the supervisor as open descriptors, so there is
no moment in which nobody holds them and two starts at the same instant cannot both win.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mps_trainer.errors import AlreadyRunningError, RunError
from mps_trainer.run import HeldLock, RunPaths, RunRecord, holder_note, state_dir, try_hold
from mps_trainer.run.process import ProcessIdentity


@dataclass(frozen=True)
class Holder:
    """What a holder of a run's locks writes about itself, for messages and for `down`."""

    run_id: str
    pid: int
    start_ticks: int
    config: str

    @classmethod
    def me(cls, run_id: str, config: str) -> Holder:
        """This process."""
        identity = ProcessIdentity.of(os.getpid())
        return cls(run_id, os.getpid(), identity.start_ticks if identity else 0, config)

    @classmethod
    def of(cls, lock: Path) -> Holder | None:
        """Who wrote the note in a lock file; None when it is empty or half written."""
        try:
            return cls(**json.loads(holder_note(lock)))
        except (json.JSONDecodeError, TypeError):
            return None

    @property
    def process(self) -> ProcessIdentity:
        """The holder's process, for a signal that cannot reach a successor of the same PID."""
        return ProcessIdentity(self.pid, self.start_ticks)

    def note(self) -> str:
        """The text for the lock file."""
        return json.dumps(asdict(self))


def take_run_locks(paths: RunPaths, *, run_id: str, config: str, derived: str, namespace: str) -> list[HeldLock]:
    """Take all locks of a run or none.

    Raises:
        AlreadyRunningError: names the run in the way.
        RunError: the state folder is full or cannot be written to.
    """
    note = Holder.me(run_id, config).note()
    folder = state_dir() / "locks"
    # These files are never deleted: the lock decides, and its file must be the same for everybody.
    wanted = (
        (paths.supervisor_lock, f"run {run_id}"),
        (folder / f"config-{_digest(os.path.realpath(derived))}.lock", f"the config {config}"),
        (folder / f"namespace-{_digest(namespace)}.lock", f"the Ray namespace {namespace!r}"),
    )
    held: list[HeldLock] = []
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for path, what in wanted:
            lock = try_hold(path, note)
            if lock is None:
                raise _already_running(path, what)
            held.append(lock)
    except (OSError, AlreadyRunningError) as error:
        if held:
            paths.supervisor_lock.unlink()
        for earlier in held:
            earlier.release()
        if isinstance(error, AlreadyRunningError):
            raise
        raise RunError(
            f"cannot take the locks of run {run_id}: {error.strerror}",
            f"see that {folder.parent} has free space and can be written to",
        ) from None
    return held


def hold_run_locks(record: RunRecord, paths: RunPaths, descriptors: Sequence[int]) -> list[HeldLock]:
    """Take over the locks that `up` handed down, or take them where it did not."""
    if not descriptors:
        return take_run_locks(
            paths,
            run_id=record.run_id,
            config=record.config,
            derived=record.derived_config,
            namespace=record.ray_namespace,
        )
    locks = [HeldLock.adopt(descriptor) for descriptor in descriptors]
    for lock in locks:
        lock.write_note(Holder.me(record.run_id, record.config).note())
    return locks


def _already_running(lock: Path, what: str) -> AlreadyRunningError:
    holder = Holder.of(lock)
    if holder is None:
        return AlreadyRunningError(f"another run is just starting with {what}", "see `mps-trainer status`")
    same = "" if what.endswith(holder.config) else f" with the config {holder.config}"
    return AlreadyRunningError(
        f"run {holder.run_id} (process {holder.pid}){same} already holds {what}",
        f"stop it with `mps-trainer down {holder.run_id}`, or give this config another project, group or name",
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""The run file: how an operator, a sidecar and a person at a shell find a run.

`mps-trainer up` writes it (0600) under a fixed folder of the user. It is live while its lock is held:

    <state folder>/runs/<run_id>.json    RunRecord, written by rename
    <state folder>/runs/<run_id>.lock    held by the supervisor for life
    <state folder>/runs/<run_id>.sidecar.lock    held by the sidecar for life
    <state folder>/runs/<run_id>.owner.lock      held by `mps-trainer run`, if that started it
    <state folder>/runs/<run_id>.load/           how busy each engine is (`engine_load`); each file held by its engine

The derived Trinity config carries the path of the JSON file, because the driver's environment does not reach
Trinity's actors.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mps_trainer.errors import RunError
from mps_trainer.run.locks import is_held

STATE_DIR_VARIABLE = "MPS_TRAINER_STATE_DIR"


def new_run_id() -> str:
    """Eight random hex digits."""
    return secrets.token_hex(4)


def boot_id() -> str:
    """This boot of this kernel; equal on two machines only if they are one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_name() -> str:
    """The host's name, for messages."""
    return socket.gethostname()


def this_host() -> str:
    """ "<host name> <boot id>": what `run_host` in a derived config is compared with."""
    return f"{host_name()} {boot_id()}"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What everybody must know of one run. Paths are absolute.

    Attributes:
        settings: `Settings.dump()` with the placement resolved by the plan.
        device: what the sidecar trains on: "cpu" or "cuda:<n>".
        mps: "on" or "off", resolved.
        mps_wish: what the user wrote: "auto" waits where "on" insists.
        owner_lock: a lock whose drop ends the run (`mps-trainer run` holds it); "" when `down` or idling ends it.
    """

    run_id: str
    config: str
    derived_config: str
    run_dir: str
    ray_namespace: str
    settings: dict[str, Any]
    device: str = "cpu"
    mps: str = "off"
    owner_lock: str = ""
    mps_wish: str = "auto"
    host: str = field(default_factory=host_name)
    boot_id: str = field(default_factory=boot_id)

    def save(self, path: Path) -> None:
        """Write the record by rename, readable by this user only."""
        temporary = path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file, indent=2)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Read a record; RunError when it is missing or is none."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise RunError(f"no run file at {path}", "the run has ended: start it again with start_mps.sh") from None
        except OSError as error:
            raise RunError(
                f"cannot read the run file {path}: {error.strerror}",
                "run as the user who started the run, with the same state folder, or start it again with start_mps.sh",
            ) from None
        except (ValueError, TypeError) as error:
            raise RunError(f"{path} is no run file: {error}", "start the run again with start_mps.sh") from None


@dataclass(frozen=True)
class RunPaths:
    """The files of one run in the state folder."""

    run_file: Path

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor: while it is, the run is live."""
        return self.run_file.with_suffix(".lock")

    @property
    def sidecar_lock(self) -> Path:
        """Held by the sidecar process."""
        return self.run_file.with_suffix(".sidecar.lock")

    @property
    def owner_lock(self) -> Path:
        """Held by `mps-trainer run`: its drop ends the run."""
        return self.run_file.with_suffix(".owner.lock")

    @property
    def successor_file(self) -> Path:
        """There while the supervisor ends a sidecar to start another one: then the run's channels have to stay."""
        return self.run_file.with_suffix(".successor")

    @property
    def load_folder(self) -> Path:
        """Where the run's engines say how busy they are; made by the first of them."""
        return self.run_file.with_suffix(".load")

    @property
    def spare_status(self) -> Path:
        """Where the sidecar's status goes while the run folder refuses it: a full disk, a removed folder."""
        return self.run_file.with_suffix(".status")

    def remove(self, *, keep_record: bool = False) -> None:
        """Delete the run's files from the state folder; the run folder with its results stays.

        With `keep_record` the run file stays too: something of the run is still in /dev/shm, and by its run file the
        next clean-up knows that the run is over; so does a status that could be written nowhere else.
        """
        locks = (self.supervisor_lock, self.sidecar_lock, self.owner_lock)
        for path in (*(() if keep_record else (self.run_file, self.spare_status)), *locks, self.successor_file):
            path.unlink(missing_ok=True)
        # An engine that goes on writes into nothing.
        shutil.rmtree(self.load_folder, ignore_errors=True)


def state_dir() -> Path:
    """The state folder of this user, made 0700; RunError when it cannot be made or somebody else owns the path."""
    named = os.environ.get(STATE_DIR_VARIABLE)
    path = Path(named) if named else Path(f"/tmp/mps-trainer-{os.getuid()}")
    _make_folder(path, parents=bool(named))
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RunError(
            f"{path} is not a folder of yours alone (owner {status.st_uid}, mode {status.st_mode & 0o777:o})",
            f"remove it, or set {STATE_DIR_VARIABLE} to a folder that only you can read",
        )
    _make_folder(path / "runs")
    return path


def _make_folder(path: Path, *, parents: bool = False) -> None:
    try:
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make the state folder {path}: {error.strerror}",
            f"set {STATE_DIR_VARIABLE} to a folder that you can write to",
        ) from None


def run_paths(run_id: str) -> RunPaths:
    """The files of the run `run_id` in the state folder."""
    return RunPaths(state_dir() / "runs" / f"{run_id}.json")


def is_run_alive(run_id: str) -> bool:
    """Whether the run's supervisor or sidecar lives."""
    paths = run_paths(run_id)
    return is_held(paths.supervisor_lock) or is_held(paths.sidecar_lock)


def live_runs() -> Iterator[tuple[RunPaths, RunRecord]]:
    """Every run of this user whose supervisor or sidecar lives."""
    for path in sorted((state_dir() / "runs").glob("*.json")):
        paths = RunPaths(path)
        if is_held(paths.supervisor_lock) or is_held(paths.sidecar_lock):
            try:
                record = RunRecord.load(path)
            except RunError:
                # A run that ends removes its file before it drops its locks.
                if not path.exists():
                    continue
                raise
            yield paths, record


def find_by_namespace(ray_namespace: str) -> tuple[RunPaths, RunRecord] | None:
    """The live run of a Ray namespace, for an operator whose YAML is not the derived one."""
    for paths, record in live_runs():
        if record.ray_namespace == ray_namespace:
            return paths, record
    return None

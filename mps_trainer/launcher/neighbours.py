"""Who else computes on the sidecar's GPU, looked at every two seconds while it is ready; and what follows.

    NVML's processes of the GPU > ours? there before us? of an engine that joined? > else a stranger, seen twice
    a stranger, mps: auto > the sidecar launches nothing > the stranger is gone > it goes on
    a stranger, mps: on   > the sidecar launches nothing > no engine measures memory > `refusal`, which ends the run

Ray decides which GPU a process gets, so a worker of verl may land where the sidecar is. The two would take turns, at
the expense of a trainer that planned with the whole GPU. With `join: env` no engine asks, so the daemon's list of
clients says who joined, and processes are told apart by their titles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mps_trainer.errors import PlacementError
from mps_trainer.launcher.process_titles import command_line, engine_title, ray_title, variable
from mps_trainer.mps.checks import PLUGINS_VARIABLE
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.nvml import GpuProcess, read_processes
from mps_trainer.mps.summons import EngineRecord
from mps_trainer.run.process import ProcessIdentity, is_descendant

log = logging.getLogger("mps_trainer.supervisor")

_EVERY_S = 2.0
SERVER_NAME = "nvidia-cuda-mps-server"
_JOINED = ("starting", "ready")


@dataclass(frozen=True)
class Stranger:
    """A process that computes on the GPU and should not. `why` is a sentence with its PID and command line."""

    process: ProcessIdentity
    why: str
    todo: str


class Neighbours:
    """Judges the processes of one GPU.

    Args:
        daemon: of this run.
        gpu_uuid: where the sidecar is.
        before: PIDs that were there when the sidecar was placed: the checks have told of them.
        join: "plugin" or "env".
        insist: `mps: on`: a stranger ends the run; otherwise the sidecar waits.
        look: reads the GPU's processes; the tests give recorded ones.

    Attributes:
        reason: why the sidecar shall launch nothing; "" when it may work.
        refusal: why the run shall end; None while it may go on.
    """

    def __init__(
        self,
        daemon: MpsDaemon,
        gpu_uuid: str,
        *,
        before: Sequence[int] = (),
        join: str = "plugin",
        insist: bool = False,
        look: Callable[[str], Sequence[GpuProcess]] = read_processes,
        every_s: float = _EVERY_S,
    ) -> None:
        self._daemon = daemon
        self._gpu_uuid = gpu_uuid
        self._before = {found for pid in before if (found := ProcessIdentity.of(pid)) is not None}
        self._join = join
        self._insist = insist
        self._look = look
        self._every_s = every_s
        self._next = 0.0
        self._accepted: set[ProcessIdentity] = set()
        self._told: set[ProcessIdentity] = set()
        self._suspects: set[ProcessIdentity] = set()
        self._strangers: dict[ProcessIdentity, Stranger] = {}
        self._blind = False
        self.reason = ""
        self.refusal: PlacementError | None = None

    def look(self, sidecar_pid: int, engines: Sequence[EngineRecord]) -> None:
        """Look, if it is time to, and decide; `sidecar_pid` is 0 while there is none."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every_s
        try:
            there = [p for p in map(ProcessIdentity.of, self._pids()) if p is not None]
            found = self._judge(there, sidecar_pid, engines)
        except PlacementError as error:
            # No answer is no stranger; those that were seen stay until they are gone.
            log.info("nobody can say who is on the GPU: %s", error.message)
            return
        # Twice in a row: a process that is just ending, or just joining, is no reason for anything.
        again = {process: stranger for process, stranger in found.items() if process in self._suspects}
        self._suspects = set(found)
        self._strangers = again
        self._decide(any(engine.state == "starting" for engine in engines))

    def _pids(self) -> list[int]:
        return [process.pid for process in self._look(self._gpu_uuid)]

    def _judge(
        self, there: Sequence[ProcessIdentity], sidecar_pid: int, engines: Sequence[EngineRecord]
    ) -> dict[ProcessIdentity, Stranger]:
        unknown = [p for p in there if p not in self._accepted]
        if not unknown and self._join == "plugin":
            return {}
        servers = self._daemon.servers()
        if self._join == "env":
            self._tell_clients(sidecar_pid)
        pids = {process.pid for process in there}
        if not pids & {sidecar_pid, *servers}:
            self._say_that_nvml_counts_otherwise(sidecar_pid)
            return {p: s for p, s in self._strangers.items() if p in there}
        clients = {client.pid for client in self._daemon.clients()}
        found = {}
        for process in unknown:
            # A server sees every GPU, so the one of another run on another GPU stands in this GPU's list as well (seen
            # on two H200). It computes nothing itself: its clients are listed on their own, where they compute.
            is_server = process.pid in servers or command_line(process.pid).startswith(SERVER_NAME)
            if is_server or self._belongs(process.pid, sidecar_pid, clients, engines):
                self._accepted.add(process)
            else:
                found[process] = self._strangers.get(process) or self._stranger(process, engines)
        return found

    def _belongs(self, pid: int, sidecar_pid: int, clients: set[int], engines: Sequence[EngineRecord]) -> bool:
        roots = [sidecar_pid, *(p.pid for p in self._before if p.is_running)]
        if self._join == "env":
            return pid in clients or any(root and is_descendant(pid, root) for root in roots)
        roots += [engine.request.pid for engine in engines if engine.state in _JOINED]
        return any(root and is_descendant(pid, root) for root in roots)

    def _stranger(self, process: ProcessIdentity, engines: Sequence[EngineRecord]) -> Stranger:
        who = f"process {process.pid} ({command_line(process.pid)[:200] or 'no command line'})"
        alone = [e for e in engines if e.state not in _JOINED and is_descendant(process.pid, e.request.pid)]
        engine = engine_title(process.pid) or (alone and alone[0].request.actor)
        if not engine:
            return Stranger(
                process,
                f"{who} computes on the sidecar's GPU {self._gpu_uuid}, and is no rollout engine",
                "Ray decides who gets which GPU: name another one (device: cuda:<n>), or use device: auto",
            )
        why = f"{who} is of an engine that did not join the sidecar on GPU {self._gpu_uuid}"
        if self._join == "env":
            todo = (
                f"export CUDA_MPS_PIPE_DIRECTORY={self._daemon.folder.pipe_dir} in the shell of `ray start`, before it"
            )
            return Stranger(process, why, todo)
        plugins = variable(process.pid, PLUGINS_VARIABLE)
        if plugins is not None and "mps_trainer" not in plugins.split(","):
            why += f": its {PLUGINS_VARIABLE}={plugins} leaves mps_trainer out"
        return Stranger(
            process,
            why,
            f"install mps-trainer where Ray's workers run, unset {PLUGINS_VARIABLE} or add mps_trainer to it, and "
            "start the engine after the sidecar; or use join: env",
        )

    def _decide(self, engine_is_starting: bool) -> None:
        before, first = self.reason, next(iter(self._strangers.values()), None)
        self.reason = "" if first is None else first.why
        if first is not None and before != self.reason:
            log.warning("the sidecar launches nothing: %s. What to do: %s", first.why, first.todo)
        elif first is None and before:
            log.info("the sidecar goes on: nobody else is on its GPU")
        # An engine that is measuring memory must not see ours go.
        if first is not None and self._insist and not engine_is_starting:
            self.refusal = PlacementError(
                f"mps: on is not possible any more: {first.why}", f"{first.todo}; or mps: auto"
            )

    def _tell_clients(self, sidecar_pid: int) -> None:
        """Say once of each client who it is: without the plugin this is all the proof that there is."""
        for client in self._daemon.clients():
            process = ProcessIdentity.of(client.pid)
            if process is None or process in self._told or (sidecar_pid and is_descendant(client.pid, sidecar_pid)):
                continue
            self._told.add(process)
            if title := engine_title(client.pid):
                log.info("engine %s (process %d) is up and proven to be an MPS client", title, client.pid)
            else:
                log.warning(
                    "process %d (%s) became an MPS client too: with join: env every CUDA process of that %s does",
                    client.pid, command_line(client.pid)[:200], "Ray" if ray_title(client.pid) else "shell",
                )  # fmt: skip

    def _say_that_nvml_counts_otherwise(self, sidecar_pid: int) -> None:
        # In a container NVML may give the PIDs of the host: then our own processes would look like strangers.
        if sidecar_pid and not self._blind:
            self._blind = True
            log.warning("NVML does not list the sidecar by its PID here, so strangers on its GPU cannot be seen")

"""The supervisor's side of a shared GPU: the daemon, the plan for the GPU, the answers to engines, the proof.

    start ---- device known ------> place > sidecar starts > READY > engines on that GPU join
          `--- device: auto ------> sidecar starts, gets warm, waits
                                    > first rollout engine asks > place > sidecar goes on > READY > that engine goes on

With `join: env` no engine asks: the sidecar comes first, and who came to its GPU is seen later (`neighbours.py`).
An engine's question is answered in a thread of the summons and waits there for the sidecar; the supervisor's loop asks
`is_placed` and tells `sidecar_is_ready` or `sidecar_is_gone`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from mps_trainer.errors import MpsTrainerError, PlacementError
from mps_trainer.launcher.membership import Membership
from mps_trainer.launcher.memory_plan import ENGINE_EXTRA, MemoryPlan, plan_for_any_engine
from mps_trainer.launcher.neighbours import Neighbours
from mps_trainer.mps.checks import Surroundings, read_surroundings, require_possible, run_checks
from mps_trainer.mps.control import CONTROL_BINARY, GpuFault, MpsDaemon
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.lease import take_gpu
from mps_trainer.mps.nvml import GpuFacts, GpuProcess, read_processes
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.mps.summons import EngineAnswer, EngineRecord, EngineRequest, SummonsServer
from mps_trainer.run import HeldLock, RunRecord
from mps_trainer.run.process import ProcessIdentity

log = logging.getLogger("mps_trainer.supervisor")

#: The pool of a sidecar whose user has not said `memory`.
DEFAULT_POOL = 4 * 2**30
# Under what an engine waits itself (the plugin's limit), so that it hears the reason.
ANSWER_S = 90.0
_ROLLOUT = "rollout"
_SPANNING = "; it spans {} GPUs: an illegal memory access in the sidecar would take the whole engine down"


class GpuShare:
    """One run's share of one GPU.

    Args:
        run_id: whose MPS folder it is.
        device: "cuda:<n>" with NVML's index, or "cuda": the GPU of the first rollout engine.
        memory: bytes of the sidecar's pool; None for the default.
        join: "plugin", or "env": no engine asks, and none is answered.
        insist: the user wrote `mps: on`: a stranger on the GPU ends the run instead of pausing it.
        look, processes: read the machine, and who is on a GPU; the tests give recorded values.

    Attributes:
        others_fault: the sidecar that ended last fell to a fatal GPU error that another process caused.
    """

    def __init__(
        self,
        run_id: str,
        device: str,
        memory: int | None,
        *,
        join: str = "plugin",
        insist: bool = False,
        binary: str = CONTROL_BINARY,
        processes: Callable[[str], Sequence[GpuProcess]] = read_processes,
        look: Callable[[], Surroundings] = read_surroundings,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._run_id = run_id
        self._device = device
        self._memory = memory or DEFAULT_POOL
        self._join = join
        self._insist = insist
        self._look = look
        self._processes = processes
        self._answer_s = answer_s
        self._folder = mps_folder(run_id)
        self.daemon = MpsDaemon(self._folder, binary)
        self._guard = threading.Condition()
        self._gpu: GpuFacts | None = None
        self._lease: HeldLock | None = None
        self._summons: SummonsServer | None = None
        self._sidecar_ready = False
        self._sidecar_pid = 0
        self._joined: set[ProcessIdentity] = set()
        self._neighbours: Neighbours | None = None
        self._gone = ""
        self._faults_told = 0
        self.others_fault = False
        self._summoned: tuple[int, float] | None = None
        self._membership = Membership(self.daemon)
        self.plan: MemoryPlan | None = None
        self.wake: Callable[[], object] = lambda: None

    @classmethod
    def of_run(cls, record: RunRecord) -> GpuShare:
        """The share that a run file asks for."""
        settings = record.settings
        join, insist = str(settings["join"]), record.mps_wish == "on"
        return cls(record.run_id, record.device, settings.get("memory"), join=join, insist=insist)

    def start(self) -> None:
        """Check, start the daemon, place the sidecar if its GPU is known, and listen to engines.

        Raises:
            PlacementError: what stands in the way, with what to do; nothing stays behind.
        """
        around = self._look()
        wanted = None if self._device == "cuda" else self._gpu_at(around, int(self._device.removeprefix("cuda:")))
        checks = run_checks(around, wanted.uuid if wanted else None)
        require_possible(checks, plugin=self._join == "plugin")
        for check in checks:
            if check.level == "warning":
                log.warning("%s: %s. What to do: %s", check.name, check.found, check.todo)
        try:
            self.daemon.start()
            if wanted is not None:
                self._place(wanted)
            if self._join == "plugin":
                # Without the socket the plugin stays inert: a number is lowered once, here in the derived config.
                self._summons = SummonsServer(self._folder.summons_socket, self._decide)
        except BaseException:
            self.close()
            raise

    @property
    def is_placed(self) -> bool:
        """Whether it is known which GPU the sidecar goes to."""
        return self._gpu is not None

    @property
    def engines(self) -> list[EngineRecord]:
        """Engines that have asked so far."""
        return self._summons.engines if self._summons else []

    @property
    def must_not_change(self) -> bool:
        """Whether an engine that joined is measuring memory: the sidecar is neither ended nor restarted then."""
        return any(engine.state == "starting" for engine in self.engines)

    @property
    def refusal(self) -> PlacementError | None:
        """Why the run shall end, with `mps: on`; None while it may go on."""
        return self._neighbours.refusal if self._neighbours is not None else None

    def sidecar_is_ready(self, pid: int = 0) -> None:
        """Engines that wait may go on and join."""
        self._sidecar_pid = pid
        with self._guard:
            self._sidecar_ready, self._gone = True, ""
            self._guard.notify_all()
        if self._summoned is not None:
            pid, when = self._summoned
            log.info("summoned by pid %d: READY after %.1f s", pid, time.monotonic() - when)
            self._summoned = None

    def sidecar_is_gone(self, why: str, *, for_good: bool) -> None:
        """The sidecar has ended. For good: engines that wait start alone. Otherwise they wait for its successor."""
        self._sidecar_pid = 0
        with self._guard:
            self._sidecar_ready = False
            if for_good:
                self._gone = why
            self._guard.notify_all()

    def sidecar_has_ended(self, pid: int, doing: str = "") -> str:
        """Tell engines that the sidecar is gone; names who broke the GPU, if somebody did, for the run's status.

        Args:
            doing: what the sidecar was doing when it ended.
        """
        self.sidecar_is_gone("it has ended", for_good=False)
        faults = self.new_faults()
        self.others_fault = bool(faults) and all(fault.pid != pid for fault in faults)
        told = ""
        for fault in faults:
            who = f"process {fault.pid}"
            if fault.pid == pid:
                who += f" (the sidecar{', ' if doing else ''}{doing})"
            log.error("fatal GPU error caused by %s; it ended the clients %s", who, fault.torn_down)
            told += f"; the MPS server names {who} for a fatal GPU error"
        return told

    def new_faults(self) -> list[GpuFault]:
        """Fatal GPU errors that the server has logged since the last call."""
        faults = self.daemon.faults()
        new, self._faults_told = faults[self._faults_told :], len(faults)
        return new

    def server_is_clean(self) -> bool:
        """Whether a new client would be accepted: no server yet or one that has recovered, and no stranger there."""
        if self._neighbours is not None and self._neighbours.reason:
            return False
        try:
            return all(self.daemon.server_status(server) == "ACTIVE" for server in self.daemon.servers())
        except PlacementError:
            return False

    def look_around(self) -> None:
        """Prove engines that are up, and see who else is on the GPU. Called often; looks at the GPU now and then."""
        self.prove_engines()
        if self._neighbours is None or not (self._sidecar_pid or self._neighbours.reason):
            return
        self._neighbours.look(self._sidecar_pid, self.engines)
        self._folder.set_pause(self._neighbours.reason)

    def prove_engines(self) -> None:
        """Judge engines that have come up since the last call; the proof, or its absence, is in the log."""
        self._membership.prove(self.engines)

    def unproven_engines(self) -> list[EngineRecord]:
        """Engines that say they are up and of which no process is a client: their membership is not claimed."""
        return self._membership.unproven(self.engines)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop listening and end the daemon; False when clients still use it, which are left alone.

        A daemon that is asked to quit ends with its last client; what is left then is swept by the next run.
        """
        if not self._gone:
            self.sidecar_is_gone("the run has ended", for_good=True)
        if self._summons is not None:
            self._summons.close()
            self._summons = None
        try:
            ended = self.daemon.quit(timeout_s)
        except MpsTrainerError as error:
            log.warning("the MPS daemon did not end: %s", error)
            ended = False
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        return ended

    def _place(self, gpu: GpuFacts) -> None:
        plan = plan_for_any_engine(gpu.total, gpu.used, self._memory)
        # After what may refuse: an engine on another GPU may still summon the sidecar there.
        self._lease = take_gpu(gpu.uuid, self._run_id)
        self.plan = plan
        GpuPlacement(gpu_uuid=gpu.uuid, pool=self.plan.pool, limit=self.plan.limit).save(self._folder)
        self._neighbours = Neighbours(
            self.daemon,
            gpu.uuid,
            before=[process.pid for process in gpu.processes],
            join=self._join,
            insist=self._insist,
            look=self._processes,
        )
        self._gpu = gpu

    def _decide(self, request: EngineRequest) -> EngineAnswer:
        deadline = time.monotonic() + self._answer_s
        with self._guard:
            if self._gpu is None and not self._summon(request):
                return EngineAnswer(False, f"{request.actor} is no rollout engine: the sidecar waits for one")
            gpu, plan = self._gpu, self.plan
            assert gpu is not None
            assert plan is not None
            if gpu.uuid not in request.gpus:
                return EngineAnswer(False, f"the sidecar of this run is on another GPU ({gpu.uuid})")
            done = self._guard.wait_for(
                lambda: self._sidecar_ready or bool(self._gone), max(0.0, deadline - time.monotonic())
            )
            if self._gone or not done:
                why = self._gone or f"it was not ready after {self._answer_s:.0f} s"
                return EngineAnswer(False, f"the engine starts alone: the sidecar is not there ({why})")
        utilization = self._share_of(request, plan)
        reason = f"joins the sidecar on {gpu.uuid}, gpu_memory_utilization at most {utilization:.3f}"
        if len(request.gpus) > 1:
            reason += _SPANNING.format(len(request.gpus))
        return EngineAnswer(True, reason, str(self._folder.pipe_dir), utilization)

    def _share_of(self, request: EngineRequest, plan: MemoryPlan) -> float:
        """The plan's share, less what engines that live on this GPU have of it and take beside it."""
        with self._guard:
            alive = {process for process in self._joined if process.is_running and process.pid != request.pid}
            there = [e for e in self.engines if e.state in ("starting", "ready") and e.utilization is not None]
            taken = {e.request.pid: e.utilization or 0.0 for e in there if e.request.pid in {p.pid for p in alive}}
            if (process := ProcessIdentity.of(request.pid)) is not None:
                self._joined.add(process)
        left = plan.utilization[0] - sum(taken.values()) - len(taken) * ENGINE_EXTRA / plan.total
        return max(0.0, math.floor(left * 1000) / 1000) if taken else plan.utilization[0]

    def _summon(self, request: EngineRequest) -> bool:
        # Outside of Ray an engine has no actor, and whoever names the run by hand means it.
        if not request.gpus or (request.actor and _ROLLOUT not in request.actor):
            return False
        asked = time.monotonic()
        around = self._look()
        gpu = next((gpu for gpu in around.nvml.gpus if gpu.uuid == request.gpus[0]), None)
        if gpu is None:
            raise PlacementError(f"NVML knows no GPU {request.gpus[0]}", "see `mps-trainer doctor`")
        require_possible(run_checks(around, gpu.uuid))
        self._summoned = (request.pid, asked)
        self._place(gpu)
        self.wake()
        return True

    @staticmethod
    def _gpu_at(around: Surroundings, index: int) -> GpuFacts:
        found = next((gpu for gpu in around.nvml.gpus if gpu.index == index), None)
        if found is None:
            raise PlacementError(
                f"there is no cuda:{index}: NVML sees {len(around.nvml.gpus)} GPUs", "name a GPU that is there"
            )
        return found

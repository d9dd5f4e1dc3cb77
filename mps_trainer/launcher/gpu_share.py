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
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mps_trainer.config.pace import is_paced
from mps_trainer.errors import MpsTrainerError, PlacementError
from mps_trainer.launcher.engine_shares import EngineShares
from mps_trainer.launcher.gpu import gpu_at
from mps_trainer.launcher.gpu_faults import GpuFaults
from mps_trainer.launcher.membership import Membership
from mps_trainer.launcher.memory_plan import MemoryPlan, plan_for_any_engine
from mps_trainer.launcher.neighbours import Neighbours
from mps_trainer.launcher.server_watch import ServerWatch
from mps_trainer.mps.checks import Surroundings, read_surroundings, require_possible, run_checks
from mps_trainer.mps.control import CONTROL_BINARY, MpsDaemon
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.lease import take_gpu
from mps_trainer.mps.nvml import GpuFacts, GpuProcess, read_processes
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.mps.summons import EngineAnswer, EngineRecord, EngineRequest, SummonsServer
from mps_trainer.mps.utilization import Utilization
from mps_trainer.run import HeldLock, RunRecord

log = logging.getLogger("mps_trainer.supervisor")

#: The pool of a sidecar whose user has not said `memory`.
DEFAULT_POOL = 4 * 2**30
# Under what an engine waits itself (the plugin's limit), so that it hears the reason.
ANSWER_S = 90.0
# How often an engine that waits looks at what others have said of themselves.
_LOOK_S = 0.1
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
        run_dir: where it says which engines are proven; None for nowhere.
        look, processes: read the machine, and who is on a GPU; the tests give recorded values.
    """

    def __init__(
        self,
        run_id: str,
        device: str,
        memory: int | None,
        *,
        join: str = "plugin",
        insist: bool = False,
        paced: bool = False,
        run_dir: Path | None = None,
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
        self._shares = EngineShares()
        self._neighbours: Neighbours | None = None
        self._gone = ""
        self._faults = GpuFaults(self.daemon)
        self._summoned: tuple[int, float] | None = None
        self._membership = Membership(self.daemon, run_dir)
        self._server = ServerWatch(self.daemon)
        self._utilization = Utilization(self._folder, wanted=paced)
        self.plan: MemoryPlan | None = None
        self.wake: Callable[[], object] = lambda: None

    @classmethod
    def of_run(cls, record: RunRecord) -> GpuShare:
        """The share that a run file asks for."""
        settings = record.settings
        join, insist = str(settings["join"]), record.mps_wish == "on"
        return cls(
            record.run_id, record.device, settings.get("memory"), join=join, insist=insist,
            paced=is_paced(str(settings.get("pace", "off")), record.mps), run_dir=Path(record.run_dir),
        )  # fmt: skip

    def start(self) -> None:
        """Check, start the daemon, place the sidecar if its GPU is known, and listen to engines.

        Raises:
            PlacementError: what stands in the way, with what to do; nothing stays behind.
        """
        around = self._look()
        wanted = None if self._device == "cuda" else gpu_at(around.nvml.gpus, int(self._device.removeprefix("cuda:")))
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
        """Whether an engine that was told to join measures memory: the sidecar is neither ended nor restarted then."""
        return self._shares.any_measures(self.engines)

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
        """It has ended or is about to. For good: engines that wait start alone. Otherwise they wait for a successor."""
        self._sidecar_pid = 0
        self._server.forget()
        with self._guard:
            self._sidecar_ready = False
            if for_good:
                self._gone = why
            self._guard.notify_all()

    def sidecar_has_ended(self, pid: int, doing: str = "", *, saw_fault: bool = False) -> str:
        """Tell engines that the sidecar is gone; whom the server names for a GPU error: as `GpuFaults.after_death`."""
        self.sidecar_is_gone("it has ended", for_good=False)
        return self._faults.after_death(pid, doing, saw_fault=saw_fault)

    @property
    def is_occupied(self) -> bool:
        """Whether somebody else computes on the GPU."""
        return self._neighbours is not None and bool(self._neighbours.reason)

    def obstacle(self) -> str:
        """Why no sidecar may be started on the GPU now, a sentence; "" when one may."""
        if self.must_not_change:
            return "an engine that was told to join is measuring memory"
        stranger = self._neighbours.reason if self._neighbours is not None else ""
        return stranger or self._server.trouble()

    def look_around(self) -> None:
        """Prove engines that are up, and see who else is on the GPU. Called often; looks at the GPU now and then."""
        self.prove_engines()
        self._folder.set_hold(self.must_not_change)
        if self._gpu is not None:
            self._utilization.sample(self._gpu.uuid)
        if self._neighbours is None or not (self._sidecar_pid or self._neighbours.reason):
            return
        self._neighbours.look(self._sidecar_pid, self.engines)
        self._folder.set_pause(self._neighbours.reason)

    def prove_engines(self) -> None:
        """Judge engines that have come up since the last call; the proof, or its absence, is in the log."""
        self._membership.prove(self.engines)

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
            if why_not := self._wait_for_turn(request, deadline):
                return EngineAnswer(False, f"the engine starts alone: {why_not}")
            # Counted before the guard is let go: who ends the sidecar, or asks next, knows of this engine.
            utilization = self._shares.grant(request, plan, self.engines)
        reason = f"joins the sidecar on {gpu.uuid}, gpu_memory_utilization at most {utilization:.3f}"
        if len(request.gpus) > 1:
            reason += _SPANNING.format(len(request.gpus))
        # Before the answer: the engine measures memory from there on.
        self._folder.set_hold(True)
        return EngineAnswer(True, reason, str(self._folder.pipe_dir), utilization)

    def _wait_for_turn(self, request: EngineRequest, deadline: float) -> str:
        """Until the sidecar is there and the engines before this one have named their numbers; why not, if not."""
        while not self._gone:
            is_open = self._shares.is_open(request, self.engines)
            if self._sidecar_ready and not is_open:
                return ""
            if (left := deadline - time.monotonic()) <= 0:
                if self._sidecar_ready:
                    return "the engine before it has not said how much memory it takes"
                return f"the sidecar is not there (it was not ready after {self._answer_s:.0f} s)"
            self._guard.wait(min(left, _LOOK_S))
        return f"the sidecar is not there ({self._gone})"

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

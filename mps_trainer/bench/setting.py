"""How trainers and engines are made on this machine: environments, devices, the one MPS daemon that they share."""

from __future__ import annotations

import os
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import mps_trainer
from mps_trainer.bench.arms import Arm
from mps_trainer.bench.engine import EngineProcess
from mps_trainer.bench.hosted import InOperator, RestService
from mps_trainer.bench.plan import SessionPlan
from mps_trainer.bench.trainers import SidecarTrainer, Trainer
from mps_trainer.bench.work import Work
from mps_trainer.errors import PlacementError
from mps_trainer.launcher.memory_plan import CONTEXT, SLACK
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import PIPE_VARIABLE, without_mps
from mps_trainer.mps.folder import MpsFolder, mps_folder
from mps_trainer.mps.nvml import GpuFacts
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.run import is_held, new_run_id, run_paths
from mps_trainer.run.engine_load import share_load
from mps_trainer.vllm_plugin.plugin import RUN_VARIABLE


class Setting:
    """One session's surroundings; inside `with` the daemon runs, if an arm needs it.

    Args:
        folder: for logs and run folders.
        gpus: the engines' GPU first, then that of the arm own-gpu; empty on the CPU.
    """

    def __init__(self, plan: SessionPlan, options: Namespace, folder: Path, gpus: tuple[GpuFacts, ...] = ()) -> None:
        self._plan, self._options, self._folder, self._gpus = plan, options, folder, gpus
        self._stack = ExitStack()
        self._mps: MpsFolder | None = None
        self._daemon: MpsDaemon | None = None
        self._paced: list[SidecarTrainer] = []

    def __enter__(self) -> Setting:
        if any(arm.mps for arm in self._plan.arms):
            self._mps = mps_folder(new_run_id())
            self._daemon = MpsDaemon(self._mps)
            self._daemon.start()
            self._stack.callback(self._daemon.quit, 10.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def trainer(self, arm: Arm, work: Work) -> Trainer:
        """The trainer of an arm, not started."""
        lengths = [r.response_tokens for r in self._plan.loads[0].batches[0].requests]
        device = {"cpu": "cpu", "gpu": self._device(0), "own": self._device(1)}[arm.place]
        if arm.trainer != "sidecar":
            kind = InOperator if arm.trainer == "operator" else RestService
            env = self._environment(None if device == "cpu" else 0)
            threads = self._options.operator_cores
            # Its one visible GPU is CUDA's first.
            hosted_on = "cpu" if device == "cpu" else "cuda:0"
            return kind(work, self._folder, lengths, device=hosted_on, threads=threads, env=env)
        settings = {"cpu_threads": self._options.operator_cores, **arm.settings(self._options.slowdown)}
        trainer = SidecarTrainer(
            work, self._folder, lengths, device=device, settings=settings, placement=self.placement(arm, work),
            daemon_pipe=self._mps.pipe_dir if self._mps is not None else None,
        )  # fmt: skip
        if arm.paced:
            self._paced.append(trainer)
        return trainer

    def placement(self, arm: Arm, work: Work) -> GpuPlacement | None:
        """What the sidecar of an MPS arm finds in its folder; None without MPS."""
        if not arm.mps or not arm.trainer:
            return None
        return GpuPlacement(
            gpu_uuid=self._gpus[0].uuid, pool=work.pool, limit=work.pool + CONTEXT + SLACK, priority=arm.priority,
            share_percent=arm.share, blocking_launches=arm.blocking,
        )  # fmt: skip

    def engine(self, name: str) -> EngineProcess:
        """An engine, started; trainers come first, so that the paced one is known."""
        return EngineProcess(name, self.engine_spec(name), self.engine_environment(name), self._folder)

    def engine_spec(self, name: str) -> dict[str, Any]:
        """For `engine_main`."""
        options = self._options
        if options.engine == "tiny":
            return {"kind": "tiny", "width": options.tiny_width, "layers": options.tiny_layers, "vocabulary": 2048}
        longest = max(
            r.prompt_tokens + r.response_tokens for load in self._plan.loads for b in load.batches for r in b.requests
        )
        most = max(len(b.requests) for load in self._plan.loads for b in load.batches)
        # A pace listens to the engine, and what that costs is in every arm or in none.
        statistics = options.statistics or any(arm.paced for arm in self._plan.arms)
        return {
            "kind": "vllm", "shape": options.shape, "utilization": self._plan.share_of_gpu[name], "longest": longest,
            "sequences": most, "folder": str(self._folder / f"engine-{name}"), "statistics": statistics,
        }  # fmt: skip

    def engine_environment(self, name: str) -> dict[str, str]:
        """A client of the daemon, or of none."""
        env = self._environment(0 if self._gpus else None)
        if name == "client":
            if self._mps is None:
                raise PlacementError("an engine shall be an MPS client and there is no daemon", "report this")
            env[PIPE_VARIABLE] = str(self._mps.pipe_dir)
            if self._paced:
                # How an engine outside of Ray finds the run whose pace it serves.
                env[RUN_VARIABLE] = self._heard.run_id
        return env

    def engines_are_up(self) -> None:
        """An engine speaks to one run; let the other paced sidecars hear it too."""
        for trainer in self._paced:
            if trainer is not self._heard and trainer.run_dir.is_dir():
                share_load(self._heard.run_dir, trainer.run_dir)

    @property
    def _heard(self) -> SidecarTrainer:
        live = (t for t in self._paced if is_held(run_paths(t.run_id).supervisor_lock))
        return next(live, self._paced[0])

    def _device(self, place: int) -> str:
        return f"cuda:{self._gpus[place].index}" if place < len(self._gpus) else "cpu"

    def _environment(self, gpu: int | None) -> dict[str, str]:
        """Of a process that is no MPS client and sees one GPU, by its ordinal: vLLM refuses UUIDs."""
        env = without_mps(os.environ)
        paths = [str(Path(mps_trainer.__file__).parents[1]), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        env |= {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        env["CUDA_VISIBLE_DEVICES"] = "" if gpu is None else str(self._gpus[gpu].index)
        if self._options.engine == "tiny":
            env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return env

"""Before READY: the task made, threads and device settled, the task tried, the newest checkpoint loaded.

prepare (no GPU) > [warm: wait for an engine] > settle_device > build_learning
"""

from __future__ import annotations

import importlib
import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch

from mps_trainer.columns import Column, PackedBatch
from mps_trainer.config import Settings
from mps_trainer.errors import PlacementError, TaskError
from mps_trainer.run import RunRecord
from mps_trainer.sidecar.checkpoint import Checkpoint, load_newest, oldest_position, save_checkpoint
from mps_trainer.sidecar.gpu.asking_width import AskingWidth
from mps_trainer.sidecar.gpu.ring_memory import RingMemory, ring_for
from mps_trainer.sidecar.gpu.shared import SharedGpu
from mps_trainer.sidecar.gpu.staging import staging_for
from mps_trainer.sidecar.gpu.task_numerics import check_task_step
from mps_trainer.sidecar.gpu.untouched import untouched_gpu
from mps_trainer.sidecar.journal import Journal
from mps_trainer.sidecar.learner import Learner
from mps_trainer.sidecar.phases import Phases
from mps_trainer.sidecar.replay import ReplayBuffer
from mps_trainer.sidecar.replay_memory import check_replay_memory
from mps_trainer.sidecar.set_aside import SetAside
from mps_trainer.sidecar.trainer import check_sampling, make_trainer
from mps_trainer.sidecar.worst_case import worst_case_batch
from mps_trainer.tasks import AuxiliaryTask, load_task, prepare_task, wire_columns

_log = logging.getLogger(__name__)
# Of worst-case steps; on a machine that the rollout keeps busy a step takes longer than at the start.
_STEPS_IN_HANG_TIMEOUT = 4


@dataclass
class Learning:
    """The learner with the two places where its progress is kept.

    Attributes:
        aside: what earlier sidecars died of.
        resumed_from: the step of the checkpoint that it started from; None when there was none.
        ring: how records get from the ring to the GPU; None on the CPU.
        memory_cap: bytes that its tensors may take on the GPU; on the CPU a wish; None without either.
    """

    learner: Learner
    columns: tuple[Column, ...]
    journal: Journal
    checkpoint_folder: Path
    keep_checkpoints: int
    aside: SetAside
    resumed_from: int | None = None
    ring: RingMemory | None = None
    memory_cap: int | None = None

    def save(self) -> None:
        """Take a checkpoint, between two steps, and delete the part of the journal that no checkpoint needs any more.

        OSError or SafetensorError when the disk refuses it; all that was there stays.
        """
        begin = time.monotonic()
        if not self.journal.unread:
            self.journal.begin_next()
        position = self.journal.position
        arrays, state = self.learner.state()
        trained_s = (time.monotonic_ns() - self.learner.trainer.trained_ns) / 1e9
        state |= {"journal": position, "columns": _describe(self.columns), "trained": time.time() - trained_s}
        path = save_checkpoint(
            self.checkpoint_folder, self.learner.trainer, Checkpoint(replay=arrays, state=state), self.keep_checkpoints
        )
        self.journal.checkpointed(position, oldest_position(self.checkpoint_folder, position[0]))
        _log.info("checkpoint %s in %.0f ms", path.name, (time.monotonic() - begin) * 1e3)


@dataclass(frozen=True)
class Prepared:
    """What of a start needs no device.

    Attributes:
        worst: the largest batch that the columns allow, made up.
    """

    task: AuxiliaryTask
    columns: tuple[Column, ...]
    worst: PackedBatch


def prepare(record: RunRecord, settings: Settings, phases: Phases) -> Prepared:
    """Settle the threads, import all that READY needs, make the task and its worst case; starts no CUDA under MPS."""
    torch.set_num_threads(settings.cpu_threads)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with untouched_gpu() if record.mps == "on" else nullcontext():
        # The first optimizer imports it, for a second or so: here, where no engine waits.
        importlib.import_module("torch._dynamo")
        phases.lap("imports")
        task = load_task(settings.task, settings.task_args)
        columns = wire_columns(task)
        prepare_task(task)
    check_sampling(task, settings)
    check_replay_memory(columns, settings, record.device)
    prepared = Prepared(task, columns, worst_case_batch(columns, settings.batch_size))
    phases.lap("task")
    return prepared


def settle_device(record: RunRecord, settings: Settings, phases: Phases) -> SharedGpu | None:
    """On a GPU the memory cap; the shared GPU under MPS. PlacementError when the device cannot be had."""
    if not record.device.startswith("cuda"):
        return None
    if record.mps == "on":
        return SharedGpu(record.run_id, phases.lap)
    if not torch.cuda.is_available():
        raise PlacementError(
            f"the run wants {record.device}, but torch {torch.__version__} sees no CUDA device",
            "install a torch build for this driver, or set device: cpu",
        )
    device = torch.device(record.device)
    fraction = settings.memory_fraction
    if settings.memory is not None:
        fraction = min(1.0, settings.memory / torch.cuda.get_device_properties(device).total_memory)
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    return None


def build_learning(
    record: RunRecord, settings: Settings, prepared: Prepared, shared: SharedGpu | None, phases: Phases
) -> Learning:
    """Build the model under the run's seed, try its worst case, and load the newest checkpoint if there is one."""
    columns = prepared.columns
    device = torch.device(shared.device if shared else record.device)
    ring = ring_for(device)
    trainer = make_trainer(prepared.task, settings, str(device), ring.batch if ring else None)
    # Before the reservation: what the driver takes on the device for a registered mapping is then not taken later.
    staging = staging_for(ring, columns, settings.batch_size) if ring else None
    phases.lap("model")
    begin = time.monotonic()
    if shared is not None:
        # Half of it, so that training's own needs still find their segments in the rest.
        width = AskingWidth(trainer, columns, prepared.worst, shared.placement.pool // 2)

        def worst_step() -> None:
            trainer.dry_step(prepared.worst)
            width.settle()

        seconds = shared.secure(worst_step).step_ms / 1e3
        compared = check_task_step(trainer, prepared.worst, shared.placement.share_percent)
        _log.info("the task's own step against float32: %s", compared)
        phases.lap("task numerics")
    else:
        trainer.dry_step(prepared.worst)
        seconds = time.monotonic() - begin
        phases.lap("dry step")
    _log.info("worst-case step of %d experiences in %.0f ms", settings.batch_size, seconds * 1e3)
    if settings.hang_timeout and seconds > settings.hang_timeout / _STEPS_IN_HANG_TIMEOUT:
        _log.warning(
            "the worst-case step takes %.1f s; a sidecar that is silent for hang_timeout, %g s, is restarted: raise it",
            seconds, settings.hang_timeout,
        )  # fmt: skip
    if settings.replay.class_balance:
        trainer.classes(prepared.worst)
    replay = ReplayBuffer(columns, settings.replay_capacity, settings.seed, settings.replay_bytes, settings.replay)
    learner = Learner(trainer, replay, settings, staging.start if staging else None)
    run_dir = Path(record.run_dir)
    resumed_from, position = _resume(run_dir, learner, columns)
    journal = Journal(run_dir / "journal", *position)
    # A predecessor may have been killed before it did.
    journal.drop_before(oldest_position(run_dir / "checkpoints", position[0]))
    return Learning(
        learner=learner,
        columns=columns,
        journal=journal,
        checkpoint_folder=run_dir / "checkpoints",
        keep_checkpoints=settings.keep_checkpoints,
        resumed_from=resumed_from,
        ring=ring,
        aside=SetAside(run_dir).guard(replay),
        memory_cap=shared.placement.pool if shared is not None else settings.memory,
    )


def _resume(run_dir: Path, learner: Learner, columns: tuple[Column, ...]) -> tuple[int | None, tuple[int, int]]:
    """Load the newest checkpoint, if there is one: its step, None without, and where the journal goes on."""
    trainer = learner.trainer
    found = load_newest(run_dir / "checkpoints", trainer)
    if found is None:
        return None, (0, 0)
    if found.state["columns"] != _describe(columns):
        raise TaskError(
            "the task's columns are not those of the run's checkpoint", "start a new run after changing a task"
        )
    learner.load_state(found.replay, found.state)
    # The scores of a successor are as old as its weights, and its clock is that of the machine since its start.
    age_s = max(0.0, time.time() - found.state.get("trained", time.time()))
    trainer.trained_ns = max(1, time.monotonic_ns() - int(age_s * 1e9))
    _log.info("resumed from step %d with %d experiences", trainer.step, len(learner.replay))
    file, offset = found.state["journal"]
    return found.state["step"], (file, offset)


def _describe(columns: tuple[Column, ...]) -> list[str]:
    return [repr(column) for column in columns]

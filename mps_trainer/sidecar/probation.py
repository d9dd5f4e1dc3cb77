"""`python -m mps_trainer.sidecar.probation --run-file PATH --report-fd N`: a user's task, tried before READY.

A process of its own, outside MPS and gone before anything is reserved: what breaks here harms nobody. It writes JSON
lines on its descriptor:

    {"at": ...}                  what it tries next; a crash happened there
    {"passed": {...}}            a `TrialReport`, at the end
    {"failed": ..., "todo": ...} why not, at the end
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from mps_trainer.columns import Column
from mps_trainer.config import Settings, load_settings
from mps_trainer.errors import ConfigError, MpsTrainerError, PlacementError, TaskError
from mps_trainer.run import RunRecord
from mps_trainer.run.exit_codes import BAD_CONFIG, OK, TASK_FAILED
from mps_trainer.run.host_memory import read_memory
from mps_trainer.run.process import resident_bytes
from mps_trainer.sidecar.trainer import check_sampling, make_trainer
from mps_trainer.sidecar.trial import TaskTrial, TrialReport, is_uncontained_fault
from mps_trainer.tasks import AuxiliaryTask, load_task, wire_columns

_MIB = 2**20
# On the CPU, beside the task's tensors: buffers of the libraries, stacks of threads.
_CPU_SLACK = 128 * _MIB
_STEPPING_SHARE = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the process; never returns."""
    parser = argparse.ArgumentParser(prog="python -m mps_trainer.sidecar.probation", description=__doc__)
    parser.add_argument("--run-file", type=Path, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--device", default="", help="cpu or cuda:<n>; the run's own by default")
    options = parser.parse_args(argv)
    os.set_inheritable(options.report_fd, False)
    faulthandler.enable()
    # Where does it hang? When its time is over the launcher asks with this signal, which then ends the process.
    faulthandler.register(signal.SIGUSR1, chain=True)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    code = _probation(options.run_file, options.device, lambda **event: _write(options.report_fd, event))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not by returning: a context that a fault has broken, or a thread of the task, could hold the process up.
    os._exit(code)


def _write(descriptor: int, event: dict[str, object]) -> None:
    # A supervisor that died has nobody to tell; this process gets its SIGTERM.
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, json.dumps(event).encode() + b"\n")


def _probation(run_file: Path, device: str, write: Callable[..., None]) -> int:
    try:
        record = RunRecord.load(run_file)
        settings = load_settings(record.settings)
        report = try_task(settings, device or record.device, lambda at: write(at=at))
    except Exception as error:  # the process's top level: every end has an exit code and a reason
        logging.getLogger(__name__).exception("probation failed")
        found, todo = explain(error)
        write(failed=found, todo=todo)
        return BAD_CONFIG if isinstance(error, (ConfigError, PlacementError)) else TASK_FAILED
    write(passed=asdict(report))
    return OK


def try_task(settings: Settings, device: str, tell: Callable[[str], None]) -> TrialReport:
    """Load the task and try it.

    Raises:
        TaskError: what the task cannot do.
        PlacementError: the device cannot be had.
    """
    torch.set_num_threads(settings.cpu_threads)
    tell("importing the task")
    task, columns = _load(settings)
    base, on_gpu = resident_bytes(), device != "cpu"
    if on_gpu:
        _take_device(torch.device(device), settings.memory)
    else:
        _limit_memory(settings.memory)
    tell("building the model")
    check_sampling(task, settings)
    trainer = make_trainer(task, settings, device)
    report = TaskTrial(trainer, columns, settings, tell, _STEPPING_SHARE * settings.probation_timeout).run()
    if not on_gpu:
        report.peak = max(_status_bytes("VmHWM") - base, 0)
    return report


def _load(settings: Settings) -> tuple[AuxiliaryTask, tuple[Column, ...]]:
    forks: list[None] = []
    os.register_at_fork(before=lambda: forks.append(None))
    try:
        task = load_task(settings.task, settings.task_args)
        columns = wire_columns(task)
    except SystemExit as error:
        raise TaskError(
            f"task {settings.task!r} called sys.exit({error.code!r}) when it was imported or made",
            "put what belongs to a script under `if __name__ == '__main__':`",
        ) from error
    if forks:
        raise TaskError(
            f"task {settings.task!r} forked {len(forks)} process(es) when it was imported or made",
            "start no processes there: the operator imports the task too, and a GPU does not survive a fork",
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise TaskError(
            f"task {settings.task!r} used CUDA when it was imported or made",
            "make tensors on the CPU there; build_model()'s module is moved to the GPU, and batch columns are on it",
        )
    return task, columns


def _take_device(device: torch.device, pool: int | None) -> None:
    if not torch.cuda.is_available():
        raise PlacementError(
            f"probation is to be on {device}, but torch {torch.__version__} sees no CUDA device",
            "install a torch build for this driver, or set device: cpu",
        )
    if pool is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, pool / total), device)


def _limit_memory(pool: int | None) -> None:
    """Let an allocation of too much fail instead of the machine."""
    most = read_memory()[1] if pool is None else pool + _CPU_SLACK
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _status_bytes("VmData") + most
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def _status_bytes(key: str) -> int:
    # Not getrusage: its peak is inherited over fork and exec, so that of a large parent would be taken for ours.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def explain(error: BaseException) -> tuple[str, str]:
    """(what was found, what to do) for whatever ended the trial."""
    if isinstance(error, MpsTrainerError):
        found, todo = error.message, error.todo.replace("sidecar.log", "probation.log")
    else:
        found, todo = f"{type(error).__name__}: {error}", "see probation.log in the run folder"
    if is_uncontained_fault(found):
        return (
            f"{found.splitlines()[0]}: a GPU fault, which beside vLLM takes the engine along",
            "correct the task's kernels or the library that holds them; the traceback in probation.log shows the line, "
            "and `compute-sanitizer` the access",
        )
    if "device-side assert" in found:
        return (
            f"{found.splitlines()[0]}: an index is out of range on the GPU",
            "check what goes into an embedding, gather, index_select or a class label; the traceback in probation.log "
            "shows the line, and probation on the CPU (device: cpu, probation: on) the index",
        )
    if "DefaultCPUAllocator" in found or "MemoryError" in found:
        return found.splitlines()[0], "raise memory:, or lower batch_size or the columns' maxima"
    return found, todo


if __name__ == "__main__":
    sys.exit(main())

"""The entry point in vLLM's group `vllm.stat_logger_plugins`: says once an iteration how busy the engine is.

This module has its class only where a run of ours is paced (`quiet_entry_point.py` says why).

    entry point > `__getattr__("EngineLoadLogger")` > which run is this? paced? > a subclass of vLLM's StatLoggerBase

vLLM 0.23 loads the group for `AsyncLLM` only, which is what Trinity uses; `attach` is for a synchronous engine.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from pathlib import Path
from typing import Any

from mps_trainer.config import load_settings
from mps_trainer.config.pace import is_paced
from mps_trainer.run import RunRecord, run_paths
from mps_trainer.run.engine_load import LoadFile
from mps_trainer.vllm_plugin.engine import own_gpus, visible_gpus
from mps_trainer.vllm_plugin.plugin import find_run
from mps_trainer.vllm_plugin.quiet_entry_point import NotWantedError, quiet_entry_point

log = logging.getLogger("mps_trainer.vllm_plugin")


def wanted_logger() -> type:
    """The logger's class. NotWantedError where no run needs to know how busy this engine is."""
    record = None
    try:
        record = paced_run()
    except Exception:  # vLLM's start must never hang on what is wrong with a run of ours
        log.debug("mps-trainer: cannot tell whether this engine's run is paced", exc_info=True)
    if record is None:
        raise NotWantedError("no run of mps-trainer that is paced; vLLM's statistics stay as they are")
    return logger_class(record)


__getattr__ = quiet_entry_point(__name__, "EngineLoadLogger", wanted_logger)


def paced_run() -> RunRecord | None:
    """The live run that this process belongs to, if its pace listens to engines."""
    run_id = find_run()
    if run_id is None:
        return None
    record = RunRecord.load(run_paths(run_id).run_file)
    return record if is_paced(load_settings(record.settings).pace, record.mps) else None


def logger_class(record: RunRecord) -> type:
    """A subclass of vLLM's `StatLoggerBase` that speaks to the run `record`; one object an engine."""
    base: type = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase
    run_dir = Path(record.run_dir)

    class EngineLoadLogger(base):  # type: ignore[misc]
        """Never raises: what goes wrong costs the signal, and the pace then goes by other signs."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._file = open_file(run_dir, vllm_config, engine_index)

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            if self._file is not None and scheduler_stats is not None:
                try:
                    self._file.write(*numbers(scheduler_stats, iteration_stats))
                except Exception:  # vLLM says itself that these statistics are no stable interface
                    log.warning("mps-trainer: cannot tell how busy the engine is", exc_info=True)
                    # A file that stays would say for ever what was true once.
                    with contextlib.suppress(OSError):
                        self._file.close()
                    self._file = None

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return EngineLoadLogger


def open_file(run_dir: Path, vllm_config: Any, engine_index: int) -> LoadFile | None:
    """The engine's file; None, told in the log, when there cannot be one."""
    try:
        gpus, sure = own_gpus(_gpus(), vllm_config, engine_index)
        return LoadFile(run_dir, engine_index, gpus, sure=sure)
    except Exception as error:  # noqa: BLE001  # the rollout comes first
        log.warning("mps-trainer: cannot tell how busy the engine is: %s", error)
        return None


def numbers(scheduler: Any, iteration: Any) -> tuple[int, int, int, int]:
    """Running, waiting, tokens generated, prompt tokens computed."""
    waiting = scheduler.num_waiting_reqs + getattr(scheduler, "num_skipped_waiting_reqs", 0)
    if iteration is None:
        return scheduler.num_running_reqs, waiting, 0, 0
    prompts = getattr(iteration, "prompt_token_stats", None)
    # Before 0.19 the iteration itself held it.
    prefill = prompts.computed if prompts is not None else iteration.num_prompt_tokens
    return scheduler.num_running_reqs, waiting, iteration.num_generation_tokens, prefill


def attach(engine: Any, record: RunRecord | None = None) -> bool:
    """Add the logger to a synchronous `LLMEngine` with statistics on, for which vLLM does not load the group.

    Returns:
        Whether it was added: not without a paced run, nor with `disable_log_stats=True`.
    """
    record = record or paced_run()
    manager = engine.logger_manager
    if record is None or manager is None:
        return False
    # The manager calls every logger with the same keyword arguments.
    manager.stat_loggers.append(logger_class(record)(engine.vllm_config, 0))
    return True


def _gpus() -> tuple[str, ...]:
    try:
        return visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except Exception:  # noqa: BLE001  # without NVML the file names no GPU and is taken for everybody's
        return ()

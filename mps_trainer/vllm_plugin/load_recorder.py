"""An entry point in vLLM's group `vllm.stat_logger_plugins`: notes each request of a real run, for the benchmark.

    MPS_TRAINER_RECORD_LOAD=FOLDER mps-trainer run trinity.yaml
    FOLDER/requests-<pid>-<engine>-<random>.jsonl  > scripts/make_load_trace.py > a trace for `bench --trace`

A line is {"arrival_s", "end_s", "prompt_tokens", "response_tokens"}, seconds on the engine's own clock. Without the
variable the class does not exist, and vLLM's statistics stay as they are.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any

from mps_trainer.vllm_plugin.quiet_entry_point import NotWantedError, quiet_entry_point

RECORD_VARIABLE = "MPS_TRAINER_RECORD_LOAD"
log = logging.getLogger("mps_trainer.vllm_plugin")


def wanted_recorder() -> type:
    """The recorder's class. NotWantedError where nobody asked for a record of this engine's load."""
    folder = os.environ.get(RECORD_VARIABLE)
    if not folder:
        raise NotWantedError(f"{RECORD_VARIABLE} is not set; vLLM's statistics stay as they are")
    return recorder_class(Path(folder))


__getattr__ = quiet_entry_point(__name__, "LoadRecorder", wanted_recorder)


def recorder_class(folder: Path) -> type:
    """A subclass of vLLM's `StatLoggerBase` that writes into `folder`; one object an engine."""
    base: type = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase

    class LoadRecorder(base):  # type: ignore[misc]
        """Never raises: a record that cannot be written is told once, and ends."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            # In a container the next run's engine has the same PID, and its clock may begin anew.
            name = f"requests-{os.getpid()}-{engine_index}-{secrets.token_hex(4)}.jsonl"
            self._path: Path | None = folder / name

        def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **words: Any) -> None:
            if self._path is None or iteration_stats is None or not iteration_stats.finished_requests:
                return
            try:
                lines = [line_of(request, time.monotonic()) for request in iteration_stats.finished_requests]
                folder.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write("".join(lines))
            except Exception:
                # Whatever it is, an engine's rollouts are worth more than their record.
                log.warning("mps-trainer: the load is not recorded any more", exc_info=True)
                self._path = None

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return LoadRecorder


def line_of(request: Any, now: float) -> str:
    """A finished request (vLLM's `FinishedRequestStats`) as a line of JSON."""
    row = {
        "arrival_s": round(now - request.e2e_latency, 4), "end_s": round(now, 4),
        "prompt_tokens": request.num_prompt_tokens, "response_tokens": request.num_generation_tokens,
    }  # fmt: skip
    return json.dumps(row) + "\n"

"""What happens in a vLLM process that loads this package's plugin.

vLLM loads general plugins before it makes the engine's configuration and before CUDA starts, in the process that builds
the engine and again in its children. Only the first one asks; the children inherit the environment and see that
it was asked:

    which run is this?  > ask its supervisor > CUDA_MPS_PIPE_DIRECTORY > utilization lowered > "ready"

vLLM does not guard plugins, so nothing here may raise. Where no run of ours matches, nothing is changed at all.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from mps_trainer.mps.environment import LIMIT_VARIABLE, PIPE_VARIABLE
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.summons import EngineRequest, EngineSession
from mps_trainer.run import find_by_namespace, is_held, run_paths
from mps_trainer.vllm_plugin.engine import follow_engine, visible_gpus

log = logging.getLogger("mps_trainer.vllm_plugin")

#: For an engine outside of Ray: the run that it belongs to.
RUN_VARIABLE = "MPS_TRAINER_RUN"
#: Set once the question has been asked, for the engine's children.
ASKED_VARIABLE = "MPS_TRAINER_ASKED"
#: Seconds that an engine waits for the sidecar to take its place.
WAIT_VARIABLE = "MPS_TRAINER_JOIN_TIMEOUT"
_DEFAULT_WAIT_S = 120.0


def register() -> None:
    """The entry point. Never raises."""
    try:
        _register()
    except Exception:  # vLLM does not guard plugins, and the rollout comes first
        log.exception("mps-trainer: the engine starts without the sidecar")


def _register() -> None:
    if os.environ.get(ASKED_VARIABLE):
        return
    run_id = find_run()
    if run_id is None:
        return
    os.environ[ASKED_VARIABLE] = run_id
    socket_path = mps_folder(run_id).summons_socket
    if not socket_path.exists():
        # A run without MPS: nothing to join.
        return
    session = EngineSession(socket_path, _request(), float(os.environ.get(WAIT_VARIABLE, _DEFAULT_WAIT_S)))
    answer = session.answer
    log.info("mps-trainer: %s", answer.reason)
    if not answer.join:
        session.close()
        return
    if _cuda_has_started():
        session.tell("failed", error="CUDA had started before the plugin was loaded, so the engine is no MPS client")
        session.close()
        log.warning("mps-trainer: CUDA has started already in this process; the engine does not join MPS")
        return
    os.environ[PIPE_VARIABLE] = answer.pipe_dir
    # A limit meant for the sidecar must not bind an engine that was started from the same shell.
    os.environ.pop(LIMIT_VARIABLE, None)
    follow_engine(session, answer.utilization)


def find_run() -> str | None:
    """The id of the live run that this process belongs to."""
    named = os.environ.get(RUN_VARIABLE)
    if named:
        return named if is_held(run_paths(named).supervisor_lock) else None
    namespace = _ray_namespace()
    found = find_by_namespace(namespace) if namespace else None
    return found[1].run_id if found else None


def _ray_namespace() -> str:
    # Only a process that Ray has started can be an actor of Trinity; others must not pay for importing it.
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().namespace)


def _actor_name() -> str:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().get_actor_name() or "")


def _request() -> EngineRequest:
    vllm = sys.modules.get("vllm")
    return EngineRequest(
        gpus=visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
        actor=_actor_name(),
        versions=f"vllm {getattr(vllm, '__version__', '?')}, {Path(sys.executable).name}",
    )


def _cuda_has_started() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized())

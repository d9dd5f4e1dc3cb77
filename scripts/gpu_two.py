#!/usr/bin/env python3
"""The drill for a machine with two GPUs: who joins where, who is a stranger, NCCL beside a busy sidecar.

    python scripts/gpu_two.py [--rounds 20] [--out docs/results/gpu_two.json]

First the sidecar is on GPU 1: an engine with Ray's ordinal 1 joins and is a client, one with ordinal 0 is none and
keeps its utilization, a foreign CUDA process on GPU 1 pauses the sidecar until it is gone. Then the sidecar trains on
GPU 0: a process on GPU 1 that is no client broadcasts 1 GiB to a client on GPU 0, again and again, and every number is
checked. The engines are stand-ins that ask as the plugin does; supervisor's side, daemon, sidecar, leases and NCCL
are real.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_fault_drill import Counter
from gpu_lab import Job, WarmParent, machine

from mps_trainer.launcher.gpu_share import GpuShare
from mps_trainer.mps.environment import NO_PIPE_DIR, PIPE_VARIABLE
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.nvml import read_nvml
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.mps.summons import EngineRequest, EngineSession
from mps_trainer.run import STATE_DIR_VARIABLE, new_run_id, run_paths, try_hold

GIB = 2**30
WISHED = 0.9
NUM_INTS = GIB // 4
LIMIT_S = 60.0


def sidecar(run_id: str, counter_path: str) -> dict[str, Any]:
    """Proves what READY needs, then trains without a break, except under a pause."""
    from gpu_fault_drill import _workload

    from mps_trainer.sidecar.gpu.safe_end import SafeEnd, WorkBound
    from mps_trainer.sidecar.gpu.shared import SharedGpu

    shared = SharedGpu(run_id)
    device, step = _workload(heavy=False)
    proof = shared.secure(step)
    counter, pause = Counter(Path(counter_path)), mps_folder(run_id).pause_file
    with SafeEnd(device):
        bound = WorkBound(device)
        while not counter.stopping:
            if pause.exists():
                bound.drain()
                time.sleep(0.05)
                continue
            step()
            bound.step_done()
            counter.tick(0)
        bound.drain()
    return {"gpu": proof.gpu_uuid, "steps": counter.value}


def engine(run_id: str, hold: str) -> dict[str, Any]:
    """Asks as the plugin does, uses CUDA, says that it is up, and waits to be let go."""
    session, found = _join(run_id)
    import torch

    torch.ones(2**20, device="cuda:0").sum().item()
    found["gpu"] = "GPU-" + str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")
    session.tell("config", wished=WISHED, utilization=found["utilization"])
    session.tell("ready")
    _hold(Path(hold))
    return found


def stranger(hold: str) -> dict[str, Any]:
    """A CUDA process that knows nothing of us."""
    import torch

    torch.ones(2**20, device="cuda:0").sum().item()
    _hold(Path(hold))
    return {}


def rank(run_id: str, number: int, port: int, rounds: int) -> dict[str, Any]:
    """Rank 0 sends and is no client; rank 1 receives and is one. Both see one GPU, as under Ray."""
    session = _join(run_id)[0] if number == 1 else None
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2, timeout=timedelta(seconds=LIMIT_S)
    )
    if session is not None:
        session.tell("ready")
    seconds, wrong = [], []
    for i in range(rounds):
        expected = torch.arange(NUM_INTS, dtype=torch.int32, device=device).add_(7919 * i)
        weights = expected.clone() if number == 0 else torch.full_like(expected, -1)
        torch.cuda.synchronize(device)
        begin = time.monotonic()
        dist.broadcast(weights, 0)
        torch.cuda.synchronize(device)
        seconds.append(time.monotonic() - begin)
        wrong.append(int((weights != expected).sum().item()))
    dist.destroy_process_group()
    return {"seconds": seconds, "wrong numbers": sum(wrong)}


def _join(run_id: str) -> tuple[EngineSession, dict[str, Any]]:
    from mps_trainer.vllm_plugin.engine import visible_gpus

    gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    request = EngineRequest(gpus, "explorer_rollout_model_0_0")
    session = EngineSession(mps_folder(run_id).summons_socket, request, LIMIT_S)
    answer = session.answer
    if answer.join:
        os.environ[PIPE_VARIABLE] = answer.pipe_dir
    utilization = WISHED if answer.utilization is None else min(WISHED, answer.utilization)
    return session, {"joined": answer.join, "utilization": utilization, "reason": answer.reason}


def _hold(path: Path) -> None:
    counter = Counter(path)
    counter.tick(0)
    end = time.monotonic() + 4 * LIMIT_S
    while not counter.stopping and time.monotonic() < end:
        time.sleep(0.05)


@dataclass
class Stage:
    """One run with its sidecar at work."""

    run_id: str
    folder: Path
    share: GpuShare
    parent: WarmParent
    job: Job
    steps: Counter

    def start(self, name: str, gpu: int, *args: Any, mps: bool = True) -> tuple[Job, Counter]:
        """A process that sees one GPU by its ordinal; without `mps` one that joins no daemon whatever it inherits."""
        hold = Counter(self.folder / f"hold-{name}-{time.monotonic_ns()}")
        env = {"CUDA_VISIBLE_DEVICES": str(gpu), **({} if mps else {PIPE_VARIABLE: NO_PIPE_DIR})}
        return self.parent.start(f"gpu_two:{name}", *(args or (str(hold.path),)), env=env), hold

    def wait(self, what: str, condition: Callable[[], bool]) -> float:
        """Look around as the supervisor does until `condition` holds; seconds that it took."""
        begin = time.monotonic()
        while not condition():
            if time.monotonic() - begin > LIMIT_S:
                raise RuntimeError(f"waited {LIMIT_S:.0f} s for {what}")
            self.share.look_around()
            time.sleep(0.05)
        return time.monotonic() - begin

    def is_client(self, job: Job) -> bool:
        return any(client.pid == job.process.pid for client in self.share.daemon.clients())


@contextmanager
def stage(folder: Path, parent: WarmParent, device: str) -> Iterator[Stage]:
    run_id = new_run_id()
    lock = try_hold(run_paths(run_id).supervisor_lock)
    assert lock is not None
    share = GpuShare(run_id, device, 4 * GIB)
    with lock:
        share.start()
        steps = Counter(folder / f"steps-{run_id}")
        placement = GpuPlacement.load(mps_folder(run_id))
        env = placement.environment({}, mps_folder(run_id))
        job = parent.start("gpu_two:sidecar", run_id, str(steps.path), env=env)
        try:
            if not steps.wait_for(1, LIMIT_S, job):
                raise RuntimeError(f"the sidecar did not start: {job.result(1)}")
            share.sidecar_is_ready(job.process.pid)
            yield Stage(run_id, folder, share, parent, job, steps)
        finally:
            steps.stop()
            ended = job.wait(30)
            closed = share.close()
            print(f"{device}: the sidecar ended with {ended}, the daemon with its last client: {closed}", flush=True)


def who_joins(at: Stage) -> dict[str, Any]:
    """The sidecar is on GPU 1."""
    uuids = [gpu.uuid for gpu in read_nvml().gpus]
    ours, hold_ours = at.start("engine", 1)
    other, hold_other = at.start("engine", 0)
    at.wait("both engines", lambda: hold_ours.value > 0 and hold_other.value > 0)
    found = {"engine on GPU 1 is a client": at.is_client(ours), "engine on GPU 0 is a client": at.is_client(other)}
    found["unproven engines"] = len(at.share.unproven_engines())
    found["lease"] = GpuPlacement.load(mps_folder(at.run_id)).gpu_uuid == uuids[1]
    foreign, hold_foreign = at.start("stranger", 1, mps=False)
    at.wait("the foreign process", lambda: hold_foreign.value > 0)
    pause = mps_folder(at.run_id).pause_file
    found["s until the sidecar is paused"] = at.wait("the pause", pause.exists)
    found["the pause names the process"] = f"process {foreign.process.pid} " in pause.read_text()
    time.sleep(0.5)
    before = at.steps.value
    time.sleep(1.0)
    found["steps in a second of pause"] = at.steps.value - before
    hold_foreign.stop()
    foreign.result(30)
    found["s until it goes on"] = at.wait("the end of the pause", lambda: not pause.exists())
    before = at.steps.value
    at.wait("a step after the pause", lambda: at.steps.value > before)
    hold_ours.stop()
    hold_other.stop()
    one, two = ours.result(30), other.result(30)
    found["engines"] = {"GPU 1": one, "GPU 0": two}
    found["right"] = (
        found["engine on GPU 1 is a client"] and not found["engine on GPU 0 is a client"] and found["lease"]
        and found["unproven engines"] == 0 and found["the pause names the process"]
        and found["steps in a second of pause"] == 0
        and (one["joined"], one["gpu"]) == (True, uuids[1]) and one["utilization"] <= WISHED
        and (two["joined"], two["gpu"], two["utilization"]) == (False, uuids[0], WISHED)
    )  # fmt: skip
    return found


def weights(at: Stage, rounds: int) -> dict[str, Any]:
    """The sidecar is on GPU 0, and so is the client that receives; the sender is on GPU 1 and no client."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    before = at.steps.value
    sender, _ = at.start("rank", 1, at.run_id, 0, port, rounds, mps=False)
    receiver, _ = at.start("rank", 0, at.run_id, 1, port, rounds)
    at.wait("the receiver's MPS context", lambda: at.is_client(receiver))
    seen = at.is_client(sender)
    sent, received = sender.result(4 * LIMIT_S), receiver.result(LIMIT_S)
    found = {
        "sidecar's steps meanwhile": at.steps.value - before, "sender is a client": seen, "rounds": rounds,
        "wrong numbers": received["wrong numbers"], "s for 1 GiB": received["seconds"],
        "sender's own wrong numbers": sent["wrong numbers"],
    }  # fmt: skip
    found["right"] = (
        found["wrong numbers"] == 0 and not seen and found["sidecar's steps meanwhile"] > 0
        and len(received["seconds"]) == rounds
    )  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts = read_nvml()
    if len(facts.gpus) < 2:
        print(f"needs 2 GPUs, found {len(facts.gpus)}" + (f" ({facts.missing})" if facts.missing else ""))
        return 2
    results: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        folder = Path(name)
        os.environ[STATE_DIR_VARIABLE] = f"{name}/s"
        with WarmParent(folder / "children.log") as parent:
            with stage(folder, parent, "cuda:1") as at:
                results["who joins"] = who_joins(at)
            with stage(folder, parent, "cuda:0") as at:
                results["weights"] = weights(at, options.rounds)
        results["left behind"] = [str(path) for path in (folder / "s" / "mps").glob("*")]
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    right = results["who joins"]["right"] and results["weights"]["right"] and not results["left behind"]
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Two GPUs, one sidecar: which engine joins, and whether new weights reach it while the sidecar trains.

    python scripts/gpu_weight_sync.py [--gib 1.0] [--rounds 20] [--out docs/results/gpu_weight_sync.json]

Trinity's own engine actor (`vLLMRolloutModel`, real vLLM, random weights) under a Ray with two GPUs, our launcher's
sidecar on `device: cuda:1`, the operator feeding it. Three parts:

1. two engines start at once; the one to which Ray gives GPU 1 joins, the other keeps its utilization and is no client;
2. as in mode `both`: a process on GPU 0, no MPS client, sends new weights through Trinity's weight-transfer group
   (NCCL) to the client engine, first beside an idle sidecar, then beside a busy one;
3. the same with a new engine and `sync_method: checkpoint`.

After each transfer the engine's own parameters are summed on its GPU and compared with what was sent. No verl: the
sender is an actor with the part of Trinity's worker that sends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_weight_actors import (
    EXAMPLE,
    UTILIZATION,
    actors,
    build_model_folder,
    num_bytes,
    parameter_shapes,
    start_engine,
)

SCRIPTS = Path(__file__).parent
OPERATOR = "data_processor.experience_pipeline.operators[0]"
CONFIG = """\
mode: explore
project: weight_sync
name: two
ray_namespace: {namespace}
checkpoint_root_dir: {work}/checkpoints
continue_from_checkpoint: false
cluster: {{node_num: 1, gpu_per_node: 2}}
model: {{model_path: {work}/model}}
explorer:
  rollout_model: {{engine_type: vllm, engine_num: 2, gpu_memory_utilization: {utilization}}}
data_processor:
  experience_pipeline:
    operators:
      - name: mps_trainer.operator.AuxTrainer
        args: {{task: preference_classifier, device: "cuda:1", mps: on, memory: 4GiB, pace: off, steps_per_batch: 100}}
"""


class Run:
    """The launcher's side: `up`, the feeding operator, `down`."""

    def __init__(self, work: Path, namespace: str) -> None:
        self.yaml = work / "trinity.yaml"
        self.yaml.write_text(CONFIG.format(work=work, namespace=namespace, utilization=UTILIZATION))
        self.log = (work / "launcher.log").open("ab")
        self.feeder: subprocess.Popen[bytes] | None = None
        self._call("up", 120)
        (self.run_dir,) = [p.resolve() for p in work.glob("checkpoints/**/latest") if p.is_symlink()]

    @property
    def version(self) -> int:
        from mps_trainer.run import Status

        return Status.load(self.run_dir).version

    def feed(self) -> None:
        derived = self.yaml.with_name("trinity.mps.yaml")
        self.feeder = subprocess.Popen(
            [sys.executable, __file__, "--feed", str(derived)], stdout=self.log, stderr=self.log
        )

    def close(self) -> None:
        if self.feeder is not None:
            self.feeder.terminate()
            self.feeder.wait(30)
        self._call("down", 90)
        self.log.close()

    def _call(self, command: str, limit_s: float) -> None:
        words = [sys.executable, "-m", "mps_trainer", command, str(self.yaml)]
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, timeout=limit_s, check=True)


def feed(derived: Path) -> None:
    """The operator, as Trinity would call it, with random experiences until SIGTERM."""
    import torch
    from omegaconf import OmegaConf
    from trinity.common.experience import EID, Experience

    from mps_trainer.operator import AuxTrainer

    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    args: Any = OmegaConf.to_container(OmegaConf.select(OmegaConf.load(derived), f"{OPERATOR}.args"))

    async def go() -> None:
        aux = AuxTrainer(**args)
        await aux.prepare()
        number = 0
        while not stopped:
            rewards = torch.rand(256)
            batch = [
                Experience(eid=EID(batch=number, task=i // 16, run=i % 16, suffix="0"), prompt_length=16,
                           tokens=torch.randint(0, 500, (64,)), logprobs=-torch.rand(48), reward=float(rewards[i]))
                for i in range(256)
            ]  # fmt: skip
            await aux.process(batch)
            number += 1
            await asyncio.sleep(0.02)
        await aux.close()

    asyncio.run(go())


async def transfers(run: Run, engine: Any, sender: Any, transfer: Any, seeds: range) -> dict[str, Any]:
    """Draw, transfer, compare, once for each seed; seconds of the transfer alone, and the sidecar's steps meanwhile."""
    seconds, wrong, version, began = [], 0, run.version, time.monotonic()
    for seed in seeds:
        wanted = await sender.draw.remote(seed)
        begin = time.monotonic()
        await transfer(seed)
        seconds.append(time.monotonic() - begin)
        wrong += wanted != await engine.weight_digest.remote()
    await asyncio.sleep(2.5)
    steps, took = run.version - version, time.monotonic() - began
    found = {"transfers": len(seconds), "wrong": wrong, "median s": statistics.median(seconds), "min s": min(seconds),
             "max s": max(seconds), "sidecar steps/s meanwhile": steps / took,
             "logprobs finite afterwards": await engine.logprobs_are_finite.remote()}  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


async def drive(work: Path, run: Run, namespace: str, layers: int, rounds: int) -> dict[str, Any]:
    import ray
    from trinity.common.constants import SyncMethod

    from mps_trainer.mps.control import MpsDaemon
    from mps_trainer.mps.folder import all_mps_folders
    from mps_trainer.run.process import is_descendant

    model_cls, sender_cls = actors()
    ((_, folder),) = all_mps_folders()
    daemon = MpsDaemon(folder)

    def is_client(facts: dict[str, Any]) -> bool:
        return any(is_descendant(client.pid, facts["pid"]) for client in daemon.clients())

    begin = time.monotonic()
    engines = [start_engine(model_cls, work, namespace, i, "nccl") for i in range(2)]
    await asyncio.gather(*[engine.prepare.remote() for engine in engines])
    facts = [await engine.facts.remote() for engine in engines]
    for each in facts:
        each["is a client"] = is_client(each)
    found: dict[str, Any] = {"engines": facts, "seconds to two engines": time.monotonic() - begin}
    print(json.dumps(found), flush=True)
    joined = next(i for i, each in enumerate(facts) if each["is a client"])
    engine, other = engines[joined], engines[1 - joined]
    await other.shutdown.remote()
    ray.kill(other)
    sender = ray.remote(sender_cls).options(num_gpus=1, name="verl_worker", namespace=namespace).remote(layers)
    found["sender"] = await sender.facts.remote()
    found["sender"]["is a client"] = is_client(found["sender"])
    address, port = await sender.address.remote()
    await asyncio.gather(
        sender.join.remote(address, port),
        engine.init_process_group.remote(address, port, rank_offset=1, world_size=2, group_name="weights"),
    )
    shapes = parameter_shapes(layers)
    await engine.set_state_dict_meta.remote([(name, "bfloat16", shape) for name, shape in shapes.items()])

    async def by_nccl(version: int) -> None:
        await asyncio.gather(sender.send.remote(), engine.sync_model_weights.remote(version, SyncMethod.NCCL))

    found["NCCL, sidecar idle"] = await transfers(run, engine, sender, by_nccl, range(1, 6))
    run.feed()
    while run.version == 0:
        await asyncio.sleep(0.5)
    found["NCCL, sidecar busy"] = await transfers(run, engine, sender, by_nccl, range(6, 6 + rounds))
    await engine.shutdown.remote()
    ray.kill(engine)

    engine = start_engine(model_cls, work, namespace, 2, "checkpoint")
    await engine.prepare.remote()
    found["engine with checkpoints"] = await engine.facts.remote()
    found["engine with checkpoints"]["is a client"] = is_client(found["engine with checkpoints"])
    address, port = await engine.get_available_address.remote(random_port=True)
    await engine.init_process_group.remote(address, port, rank_offset=0, world_size=1, group_name="weights")

    async def by_checkpoint(version: int) -> None:
        await sender.save.remote(str(work / "job" / f"global_step_{version}" / "actor"))
        await engine.sync_model_weights.remote(version, SyncMethod.CHECKPOINT)

    found["checkpoint, sidecar busy"] = await transfers(run, engine, sender, by_checkpoint, range(100, 105))
    await engine.shutdown.remote()
    return found


def judge(found: dict[str, Any], uuids: list[str], log: str) -> bool:
    first, second = sorted(found["engines"], key=lambda each: each["CUDA_VISIBLE_DEVICES"])
    parts = [part for name, part in found.items() if "sidecar" in name]
    return (
        [first["is a client"], second["is a client"]] == [False, True]
        and first["utilization"] == UTILIZATION and not first["pipe directory"]
        and found["sender"]["gpu"] == uuids[0] and not found["sender"]["is a client"]
        and found["engine with checkpoints"]["is a client"]
        and len(parts) == 3 and all(p["wrong"] == 0 and p["logprobs finite afterwards"] for p in parts)
        and all(p["sidecar steps/s meanwhile"] > 1 for p in parts[1:])
        and log.count("proven to be an MPS client") == 2
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=20, help="NCCL transfers beside a busy sidecar")
    parser.add_argument("--limit-s", type=float, default=420)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--feed", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.feed:
        feed(args.feed)
        return 0
    from gpu_lab import gpu_uuids, machine

    uuids = gpu_uuids()
    if len(uuids) != 2:
        sys.exit(f"this needs exactly 2 GPUs, and there are {len(uuids)}")
    layers = max(1, round((args.gib * 2**30 - num_bytes(0)) / (num_bytes(1) - num_bytes(0))))
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        found, log = measure(Path(name), layers, args.rounds, args.limit_s, args.out)
    right = judge(found, uuids, log)
    result = {"machine": machine(), "bytes of weights": num_bytes(layers), **found, "as wanted": right}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    return 0 if right else 1


def measure(work: Path, layers: int, rounds: int, limit_s: float, out: Path | None) -> tuple[dict[str, Any], str]:
    import ray

    os.environ.setdefault("MPS_TRAINER_STATE_DIR", f"{work}/s")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), str(EXAMPLE), *sys.path])
    namespace = f"weight_sync/{work.name}"
    build_model_folder(work, layers)
    run = Run(work, namespace)
    try:
        ray.init(
            address="local", num_cpus=8, num_gpus=2, namespace=namespace, include_dashboard=False, log_to_driver=True
        )
        limited = asyncio.wait_for(drive(work, run, namespace, layers, rounds), limit_s)
        found: dict[str, Any] = asyncio.run(limited)
    finally:
        ray.shutdown()
        run.close()
        log = (run.run_dir / "supervisor.log").read_text()
        if out:
            texts = [(run.run_dir / "sidecar.log").read_text(), (work / "launcher.log").read_text()]
            out.with_suffix(".log").write_text("\n==\n".join([log, *texts])[-100_000:])
    return found, log


if __name__ == "__main__":
    sys.exit(main())

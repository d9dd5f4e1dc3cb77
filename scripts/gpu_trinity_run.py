#!/usr/bin/env python3
"""A real `trinity run` on one GPU: real Ray, a real vLLM engine, our operator, our sidecar under MPS, scores used.

    python scripts/gpu_trinity_run.py [--steps 12] [--memory 4GiB] [--out docs/results/gpu_trinity_run.json]

Mode explore with a tiny random model, so that the minutes go into starting Ray and vLLM. The rule of
examples/cpu_rollout makes the rewards, so the classifier has something to learn and the filter something to drop.
While it runs, this script looks at the clients of the run's MPS daemon and at the sidecar's memory once a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from gpu_lab import machine

from mps_trainer.bench.load import write_trace
from mps_trainer.bench.recorded import read_requests, to_load
from mps_trainer.config.units import parse_size
from mps_trainer.errors import PlacementError
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import all_mps_folders
from mps_trainer.mps.nvml import read_nvml
from mps_trainer.run import Status

EXAMPLE = Path(__file__).parents[1] / "examples" / "cpu_rollout"
CONFIG = """\
mode: explore
project: gpu_rollout
name: explore
ray_namespace: gpu_rollout/{name}
checkpoint_root_dir: {work}/checkpoints
continue_from_checkpoint: false
cluster: {{node_num: 1, gpu_per_node: 1}}
algorithm: {{algorithm_type: grpo, repeat_times: 16}}
model: {{model_path: {work}/tiny, max_model_len: {length}, max_prompt_tokens: 128, max_response_tokens: {response}}}
buffer:
  batch_size: 16
  total_steps: {steps}
  explorer_input:
    taskset:
      name: prompts
      storage_type: file
      path: {example}/tasks
      format: {{prompt_key: question}}
      repeat_times: 16
      workflow_args: {{rule: {{seed: 1, kind: share, noise: 0.05}}}}
    default_workflow_type: cpu_rollout.workflow.TokenRuleWorkflow
  trainer_input:
    experience_buffer: {{name: experiences, storage_type: sql, path: "sqlite:///{work}/explore.db"}}
explorer:
  runner_per_model: 2
  max_retry_times: 0
  rollout_model:
    engine_type: vllm
    engine_num: 1
    tensor_parallel_size: 1
    enforce_eager: true
    gpu_memory_utilization: 0.95
data_processor:
  experience_pipeline:
    save_input: false
    operators:
      - name: mps_trainer.operator.AuxTrainer
        args:
          task: preference_classifier
          use: filter
          filter: {{drop: quantile, value: 0.05}}
          min_version: 8
          device: cuda:0
          mps: on
          memory: {memory}
"""


def build_model(work: Path) -> None:
    """The example's model with one head of 64: the attention kernels of a GPU know no heads of 16."""
    sys.path.insert(0, str(EXAMPLE))
    from cpu_rollout import tiny_model

    config = tiny_model.Qwen2Config
    tiny_model.Qwen2Config = lambda **words: config(**{**words, "num_attention_heads": 1, "num_key_value_heads": 1})
    tiny_model.build(work / "tiny")


class Watcher(threading.Thread):
    """Clients of the run's daemon and the memory of each process on the GPU, once a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.clients: dict[int, int] = {}
        self.used: dict[int, list[int]] = {}

    def run(self) -> None:
        while not self.stop.wait(1.0):
            for _run_id, folder in all_mps_folders():
                with contextlib.suppress(PlacementError):
                    for client in MpsDaemon(folder).clients():
                        self.clients[client.pid] = self.clients.get(client.pid, 0) + 1
            for gpu in read_nvml().gpus:
                for process in gpu.processes:
                    self.used.setdefault(process.pid, []).append(process.used)


def run(work: Path, limit_s: float) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), *sys.path])}
    watcher = Watcher()
    watcher.start()
    started = time.monotonic()
    with (work / "console.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "mps_trainer", "run", str(work / "trinity.yaml"), "--ray", "private"],
            env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.terminate()
            code = None
            child.wait(90)
    watcher.stop.set()
    watcher.join(5)
    (run_dir,) = [p.resolve() for p in work.glob("checkpoints/**/latest") if p.is_symlink()]
    return {
        "exit code": code,
        "seconds": time.monotonic() - started,
        **judge(work, run_dir, watcher),
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def judge(work: Path, run_dir: Path, watcher: Watcher) -> dict[str, Any]:
    console = (work / "console.log").read_text(errors="replace")
    sidecar, supervisor = ((run_dir / f"{name}.log").read_text(errors="replace") for name in ("sidecar", "supervisor"))
    batches = [json.loads(line) for line in _lines(run_dir / "metrics.jsonl")]
    batches = [b for b in batches if b["kind"] == "batch"]
    operator = [json.loads(line) for line in _lines(run_dir / "operator.jsonl")]
    status = Status.load(run_dir)
    pid = int(re.findall(r"sidecar (\d+) is ready", supervisor)[-1])
    steady = watcher.used.get(pid, [])[10:]
    return {
        "proof": re.findall(r"MPS client of .*", sidecar),
        "engines": re.findall(r"engine .*", supervisor),
        "clients seen (pid: seconds)": watcher.clients,
        "sidecar pid": pid,
        "sidecar memory, bytes, over its steady seconds": [min(steady), max(steady), len(steady)] if steady else [],
        "status": {"state": status.state.value, "version": status.version, "experiences": status.experiences,
                   "scored": status.scored, "loss": [status.first_loss, status.loss]},
        "auc by batch": [b["auc"] for b in batches],
        "score ms by batch": [b.get("score_ms") for b in batches],
        "step ms by batch": [b.get("step_ms") for b in batches],
        "dropped by the filter, by batch": [line.get("filtered", 0) for line in operator],
        "verdict": console.splitlines()[-4:],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--response-tokens", type=int, default=48, help="the longest response")
    parser.add_argument("--record-load", type=Path, help="a trace of the engine's requests, for `mps-trainer bench`")
    parser.add_argument("--limit-s", type=float, default=420)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parse_size(args.memory)
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        work = Path(name)
        os.environ.setdefault("MPS_TRAINER_STATE_DIR", f"{name}/s")
        build_model(work)
        words = {"name": work.name, "work": work, "steps": args.steps, "example": EXAMPLE, "memory": args.memory}
        words |= {"response": args.response_tokens, "length": args.response_tokens + 208}
        if args.record_load:
            os.environ["MPS_TRAINER_RECORD_LOAD"] = f"{work}/load"
        (work / "trinity.yaml").write_text(CONFIG.format(**words))
        try:
            found = run(work, args.limit_s)
            found["left"] = {
                "mps folders": [run_id for run_id, _ in all_mps_folders()],
                "on the GPU": [p.pid for gpu in read_nvml().gpus for p in gpu.processes],
                "shared memory": [p.name for p in Path("/dev/shm").glob("*mpst.*")],
            }
        finally:
            if args.out:
                logs = [work / "console.log", *work.glob("checkpoints/**/s*.log")]
                text = "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-40000:]}" for p in logs if p.exists())
                args.out.with_suffix(".log").write_text(text)
            if args.record_load and (files := sorted(work.glob("load/*.jsonl"))):
                write_trace(to_load(read_requests(files[:1]), args.record_load.name), args.record_load)
        print(json.dumps(found, indent=1))
    aucs = [auc for auc in found["auc by batch"] if auc is not None]
    used = found["sidecar memory, bytes, over its steady seconds"]
    right = (
        found["exit code"] == 0
        and any("proven to be an MPS client" in line for line in found["engines"])
        and found["clients seen (pid: seconds)"].get(found["sidecar pid"], 0) > 10
        and used and used[1] - used[0] < 2**20
        and len(aucs) > 1 and aucs[-1] > aucs[0] and sum(found["dropped by the filter, by batch"]) > 0
        and not any(found["left"].values())
    )  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), **found, "as wanted": bool(right)}, indent=1))
    print("as wanted:", bool(right))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""A real vLLM engine and a sidecar on one GPU: proven by PID, memory as planned, output finite, throughput measured.

    python scripts/gpu_beside_vllm.py [--memory 8GiB] [--utilization 0.9] [--out docs/results/gpu_beside_vllm.json]

Arms, each with a fresh engine: "alone" (no MPS, no sidecar, the planned utilization) and "beside" (the engine finds the
run by its plugin, joins, and lowers its own utilization). The engine has the shape of Qwen2.5-7B with random weights.
Needs vllm and this package installed (the plugin is an entry point).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_fault_drill import Counter
from gpu_lab import WarmParent, machine

from mps_trainer.config.units import parse_size
from mps_trainer.launcher.memory_plan import EngineWish, MemoryPlan, plan_memory
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import without_mps
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.lease import take_gpu
from mps_trainer.mps.nvml import GpuFacts, read_nvml
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.mps.process import is_descendant
from mps_trainer.mps.summons import EngineAnswer, EngineRequest, SummonsServer
from mps_trainer.run import new_run_id, run_paths, try_hold

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def engine(model: str, utilization: float, rounds: int, result: str) -> None:
    """The engine's process: build it, generate, say what it saw."""
    import numpy as np
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    llm = LLM(
        model, skip_tokenizer_init=True, load_format="dummy", gpu_memory_utilization=utilization, max_model_len=1024,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, max_num_seqs=256,
    )  # fmt: skip
    config = llm.llm_engine.vllm_config
    up = time.monotonic() - started
    prompts = [{"prompt_token_ids": row} for row in np.random.default_rng(0).integers(3, 150000, (256, 128)).tolist()]
    params = SamplingParams(max_tokens=256, ignore_eos=True, detokenize=False, logprobs=1)
    rates, bad = [], 0
    for _ in range(rounds):
        begin = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took = time.monotonic() - begin
        rates.append(sum(len(o.outputs[0].token_ids) for o in outputs) / took)
        for output in outputs:
            chosen = [next(iter(step.values())).logprob for step in output.outputs[0].logprobs]
            bad += int((~np.isfinite(chosen)).sum())
    report = {
        "seconds to ready": up, "utilization": config.cache_config.gpu_memory_utilization,
        "KV blocks": config.cache_config.num_gpu_blocks, "tokens/s": rates, "logprobs not finite": bad,
        "pipe directory": os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""),
    }  # fmt: skip
    Path(result).write_text(json.dumps(report))
    # Holds the engine until the parent has looked at it.
    sys.stdin.readline()


def sidecar(run_id: str, counter_path: str) -> dict[str, Any]:
    """A classifier that trains without a pause, with everything that READY needs proven first."""
    import torch
    from gpu_fault_drill import _workload

    from mps_trainer.sidecar.gpu.driver import memory_info
    from mps_trainer.sidecar.gpu.safe_end import SafeEnd, WorkBound
    from mps_trainer.sidecar.gpu.shared import SharedGpu

    started = time.monotonic()
    shared = SharedGpu(run_id)
    device, step = _workload(heavy=False)
    proof = shared.secure(step)
    ready = time.monotonic() - started
    counter = Counter(Path(counter_path))
    free = [memory_info()[0]]
    with SafeEnd(device):
        bound = WorkBound(device)
        begin = time.monotonic()
        while not counter.stopping:
            step()
            bound.step_done()
            counter.tick(0)
            if counter.value % 1000 == 0:
                free.append(memory_info()[0])
        bound.drain()
    assert shared.reservation is not None
    shared.reservation.check_constant(device)
    return {
        "seconds to ready, warm": ready, "pool": proof.pool, "limit": proof.limit, "refused": proof.refused,
        "numerics s": proof.numerics.seconds, "steps/s": counter.value / (time.monotonic() - begin),
        "change of free memory, bytes": max(free) - min(free), "samples": len(free),
        "torch reserved": torch.cuda.memory_reserved(device),
    }  # fmt: skip


def run_engine(folder: Path, utilization: float, rounds: int, env: dict[str, str], look: Any = None) -> dict[str, Any]:
    """One engine in a process of its own; `look(pid)` is called while it is up."""
    result = folder / "engine.json"
    result.unlink(missing_ok=True)
    code = f"import gpu_beside_vllm as g; g.engine({str(folder / 'model')!r}, {utilization}, {rounds}, {str(result)!r})"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with (folder / "engine.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**env, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    deadline = time.monotonic() + 280
    try:
        while not result.exists():
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no engine ({child.poll()}):\n{(folder / 'engine.log').read_text()[-3000:]}")
            time.sleep(0.2)
        time.sleep(0.2)
        found: dict[str, Any] = json.loads(result.read_text())
        if look is not None:
            found.update(look(child.pid))
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(40)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(10)
    return found


def beside(folder: Path, gpu: GpuFacts, plan: MemoryPlan, wished: float, rounds: int) -> dict[str, Any]:
    run_id = new_run_id()
    paths = run_paths(run_id)
    mps = mps_folder(run_id)
    daemon = MpsDaemon(mps)
    placement = GpuPlacement(gpu_uuid=gpu.uuid, pool=plan.pool, limit=plan.limit)
    started = time.monotonic()
    times: dict[str, float] = {}
    with (
        try_hold(paths.supervisor_lock) or sys.exit("no lock"),
        take_gpu(gpu.uuid, run_id),
        WarmParent(folder / "children.log") as parent,
    ):
        times["warm parent"] = time.monotonic() - started
        daemon.start()
        placement.save(mps)
        counter = Counter(folder / "counter")
        job = parent.start("gpu_beside_vllm:sidecar", run_id, str(counter.path), env=placement.environment({}, mps))
        if not counter.wait_for(1, 60, job):
            raise RuntimeError(job.result(1))
        times["up to the first step"] = time.monotonic() - started

        def decide(request: EngineRequest) -> EngineAnswer:
            return EngineAnswer(
                gpu.uuid in request.gpus, f"join on {request.gpus}", str(mps.pipe_dir), plan.utilization[0]
            )

        server = SummonsServer(mps.summons_socket, decide)
        seen: dict[str, Any] = {}

        def look(pid: int) -> dict[str, Any]:
            clients = daemon.clients()
            seen["clients"] = [client.pid for client in clients]
            used = {p.pid: p.used for g in read_nvml().gpus if g.uuid == gpu.uuid for p in g.processes}
            return {
                "sidecar is a client": any(client.pid == job.process.pid for client in clients),
                "engine is a client": any(is_descendant(client.pid, pid) for client in clients),
                "engine's own report": [f"{e.state} {e.wished} -> {e.utilization}" for e in server.engines],
                "NVML bytes by process": used,
            }

        env = {**os.environ, "MPS_TRAINER_RUN": run_id}
        found = run_engine(folder, wished, rounds, env, look)
        counter.stop()
        found["sidecar"] = job.result(30)
        found["seconds"] = times
        server.close()
        found["daemon ended"] = daemon.quit()
    for path in paths.run_file.parent.glob(f"{run_id}*"):
        path.unlink()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gpu = read_nvml().gpus[0]
    plan = plan_memory(gpu.total, gpu.used, [EngineWish("vLLM", args.utilization)], wish=parse_size(args.memory))
    for row in plan.table():
        print("  {:75} {:>10} {:>7}".format(*row))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        folder = Path(name)
        os.environ.setdefault("MPS_TRAINER_STATE_DIR", f"{name}/s")
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(QWEN_7B))
        try:
            results["beside"] = beside(folder, gpu, plan, args.utilization, args.rounds)
            print(json.dumps(results["beside"], indent=1), flush=True)
            results["alone"] = run_engine(folder, plan.utilization[0], args.rounds, without_mps(os.environ))
            print(json.dumps(results["alone"], indent=1), flush=True)
        finally:
            if args.out:
                log = (folder / "engine.log").read_text() if (folder / "engine.log").exists() else ""
                args.out.with_suffix(".log").write_text(log[-60_000:])
    one, two = results["beside"], results["alone"]
    right = (
        one["sidecar is a client"] and one["engine is a client"] and one["logprobs not finite"] == 0
        and one["sidecar"]["change of free memory, bytes"] == 0
        and abs(one["KV blocks"] / two["KV blocks"] - 1) < 0.01
    )  # fmt: skip
    if args.out:
        args.out.write_text(
            json.dumps({"machine": machine(), "plan": plan.rows, **results, "as wanted": right}, indent=1)
        )
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

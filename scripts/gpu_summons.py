#!/usr/bin/env python3
"""How long a rollout engine waits for the sidecar that it summons, and how long `up` takes with a known GPU.

    python scripts/gpu_summons.py [--repeats 5] [--memory 4GiB] [--vllm] [--out docs/results/gpu_summons.json]

Each repeat is two runs by the real command line. "summons": `mps-trainer up` with device: auto, which comes back when
the sidecar is warm; then a process asks as the plugin does in vLLM, and its wait is measured. On a machine with one GPU
auto would place at once, so the plan is told otherwise. "cuda:0": `up` to READY. After each run nothing may be left.
It starts no repeat that would not fit into --budget-s. With --vllm one more summons comes from a real, tiny engine (at
most 280 s more; needs vllm and this package installed).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_lab import lab_gpus, machine

from mps_trainer.config.units import parse_size
from mps_trainer.launcher.runs import RunView, end_runs, list_runs
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.folder import all_mps_folders, mps_folder
from mps_trainer.mps.nvml import GpuFacts
from mps_trainer.run.process import ProcessIdentity

CONFIG = """\
mode: explore
project: summons
name: {name}
checkpoint_root_dir: {work}/checkpoints
model: {{model_path: {work}/model}}
buffer: {{batch_size: 16, total_steps: 1}}
data_processor:
  experience_pipeline:
    operators:
      - name: mps_trainer.operator.AuxTrainer
        args: {{task: preference_classifier, device: "{device}", mps: on, memory: {memory}, ready_timeout: 60s}}
"""
# The command line, with a plan for a machine on which nobody knows yet where Ray will put the engine.
AUTO = """
import sys
from dataclasses import replace
from mps_trainer.launcher import up
decide = up.make_plan
up.make_plan = lambda *words: replace(decide(*words), device="cuda")
from mps_trainer.cli import main
sys.exit(main())
"""
# What the plugin does in vLLM, without vLLM: find the run, ask, say that we are up.
ENGINE = """
import json, time
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.summons import EngineSession
from mps_trainer.vllm_plugin import plugin
run_id, request = plugin.find_run(), plugin._request()
begin = time.monotonic()
session = EngineSession(mps_folder(run_id).summons_socket, request, 60.0)
answer = {"seconds": time.monotonic() - begin, "join": session.answer.join, "reason": session.answer.reason}
session.tell("failed", error="it only asked")
session.close()
print(json.dumps(answer))
"""
TINY = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SETTLE_S = 5.0
NOISE_BYTES = 16 * 2**20


def python(*words: str, limit_s: float, **env: str) -> str:
    """Its stdout; RuntimeError with all that it said when it failed."""
    paths = os.pathsep.join([str(Path(__file__).parent), *(path for path in sys.path if path)])
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": paths, **env},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{words[:3]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def up(work: Path, device: str, memory: str) -> tuple[RunView, float]:
    """The run and the seconds of the whole command, the start of its interpreter included."""
    config = work / f"{device.replace(':', '')}.yaml"
    config.write_text(CONFIG.format(name=config.stem, work=work, device=device, memory=memory))
    begin = time.monotonic()
    how = ["-c", AUTO] if device == "auto" else ["-m", "mps_trainer"]
    python(*how, "up", str(config), limit_s=90)
    took = time.monotonic() - begin
    (run,) = list_runs()
    return run, took


def processes_of(run: RunView) -> dict[str, ProcessIdentity | None]:
    """Ours, while they live."""
    sidecar = ProcessIdentity.of(run.status.pid) if run.status else None
    supervisor = ProcessIdentity.of(run.supervisor.pid) if run.supervisor else None
    return {"sidecar": sidecar, "supervisor": supervisor, "daemon": MpsDaemon(mps_folder(run.record.run_id)).find()}


def gpu_now() -> GpuFacts:
    return lab_gpus()[0]


def end(run: RunView, before: GpuFacts) -> dict[str, Any]:
    """End the run; what is left of it, everything empty when all is well."""
    ours = processes_of(run)
    begin = time.monotonic()
    end_runs([run], timeout_s=40)
    took = time.monotonic() - begin
    # The driver takes a moment to give memory back after the last process has gone.
    deadline = time.monotonic() + SETTLE_S
    while gpu_now().used - before.used > NOISE_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)
    now = gpu_now()
    more = now.used - before.used
    left = {
        "processes": [name for name, process in ours.items() if process is None or process.is_running],
        "on the GPU": sorted({p.pid for p in now.processes} - {p.pid for p in before.processes}),
        "GPU memory, bytes": more if more > NOISE_BYTES else 0,
        "shared memory": [p.name for p in Path("/dev/shm").glob(f"*{run.record.run_id}*")],
        "mps folders": [run_id for run_id, _ in all_mps_folders() if run_id == run.record.run_id],
        "locks and run file": [p.name for p in (Path(os.environ["MPS_TRAINER_STATE_DIR"]) / "runs").glob("*")],
    }
    return {"end_s": took, "left": {name: what for name, what in left.items() if what}}


def startup(run: RunView) -> dict[str, Any]:
    run_dir = Path(run.record.run_dir)
    lines = (run_dir / "supervisor.log").read_text().splitlines() + (run_dir / "sidecar.log").read_text().splitlines()
    said = [line for line in lines if "summoned by" in line or "ready in" in line]
    return {"startup": json.loads((run_dir / "startup.json").read_text()), "said": said}


def summons(work: Path, memory: str, before: GpuFacts, vllm: bool = False) -> dict[str, Any]:
    run, took = up(work, "auto", memory)
    found: dict[str, Any] = {"arm": "vllm" if vllm else "summons", "up_s": took}
    try:
        assert run.status is not None
        found["state after up"] = run.status.state.value
        # A server starts with the first client.
        found["MPS servers while it waits"] = len(MpsDaemon(mps_folder(run.record.run_id)).servers())
        found["GPU memory while it waits, bytes"] = gpu_now().used - before.used
        if vllm:
            from gpu_beside_vllm import run_engine

            (work / "model").mkdir(exist_ok=True)
            (work / "model" / "config.json").write_text(json.dumps(TINY))
            found["engine"] = run_engine(work, 0.9, 1, {**os.environ, "MPS_TRAINER_RUN": run.record.run_id})
        else:
            said = python("-c", ENGINE, limit_s=90, MPS_TRAINER_RUN=run.record.run_id, CUDA_VISIBLE_DEVICES="0")
            found["engine"] = json.loads(said)
            if not found["engine"]["join"]:
                raise RuntimeError(found["engine"]["reason"])
        found |= startup(run)
    finally:
        found |= end(run, before)
    return found


def known_gpu(work: Path, memory: str, before: GpuFacts) -> dict[str, Any]:
    run, took = up(work, "cuda:0", memory)
    found: dict[str, Any] = {"arm": "cuda:0", "up_s": took}
    try:
        found |= startup(run)
    finally:
        found |= end(run, before)
    return found


def spread(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"n": 0}
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    warm = [r for r in rounds if r["arm"] == "summons"]
    cold = [r for r in rounds if r["arm"] == "cuda:0"]
    phases = {
        arm: {name: spread([r["startup"]["phases_s"][name] for r in some]) for name in some[0]["startup"]["phases_s"]}
        for arm, some in (("summons", warm), ("cuda:0", cold))
        if some
    }
    return {
        "summons to READY, s": spread([r["engine"]["seconds"] for r in warm]),
        "up to READY with cuda:0, s": spread([r["up_s"] for r in cold]),
        "up to warm with auto, s": spread([r["up_s"] for r in warm]),
        "end, s": spread([r["end_s"] for r in rounds]),
        "phases, s": phases,
        "left": [r["left"] for r in rounds if r["left"]],
    }


def logs(work: Path) -> str:
    found = sorted(work.glob("checkpoints/**/s*.log"), key=lambda path: path.stat().st_mtime)
    return "\n".join(f"== {p.parent.name}/{p.name}\n{p.read_text(errors='replace')[-8000:]}" for p in found)


def measure(work: Path, args: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    before = gpu_now()
    started, longest = time.monotonic(), 0.0
    for _ in range(args.repeats):
        begin = time.monotonic()
        if begin + longest > started + args.budget_s:
            print(f"stopped: another repeat of {longest:.0f} s would exceed {args.budget_s:.0f} s")
            break
        for one in (summons, known_gpu):
            rounds.append(one(work, args.memory, before))
            print(json.dumps(rounds[-1]), flush=True)
        longest = max(longest, time.monotonic() - begin)
    if args.vllm:
        rounds.append(summons(work, args.memory, before, vllm=True))
        print(json.dumps(rounds[-1]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--budget-s", type=float, default=115.0)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parse_size(args.memory)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as name:
        work = Path(name)
        # Its own, whatever the shell has: every live run in it is ours, and none may be left.
        os.environ["MPS_TRAINER_STATE_DIR"] = f"{name}/s"
        try:
            measure(work, args, rounds)
        finally:
            end_runs(list_runs(), timeout_s=40)
            if args.out:
                args.out.with_suffix(".log").write_text(logs(work))
    summary = summarise(rounds)
    right = (
        all(r["state after up"] == "waiting" and not r["MPS servers while it waits"] for r in rounds if "engine" in r)
        and not summary["left"]
        and summary["summons to READY, s"]["median"] < 4
        and summary["up to READY with cuda:0, s"]["median"] < 15
    )
    result = {"machine": machine(), "summary": summary, "rounds": rounds, "as wanted": right}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(summary, indent=1))
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

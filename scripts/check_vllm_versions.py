#!/usr/bin/env python3
"""The plugin against the real EngineArgs of several vLLM versions, on a machine without a GPU.

    python scripts/check_vllm_versions.py [0.19.1 0.23.0]

Of each wheel (about 300 to 450 MB, into a temporary folder) only the Python files are unpacked; nothing is installed
into this environment. In a process of its own the real `EngineArgs` loads the real entry point, which asks a real
socket; then its `create_engine_config` is called as an engine calls it. No engine is built (no compiled parts).
Needs this package installed (the entry point), torch, transformers, and the network.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.summons import EngineAnswer, SummonsServer
from mps_trainer.run import STATE_DIR_VARIABLE, new_run_id, run_paths, try_hold

# What vLLM imports on the way to EngineArgs and a Trinity environment without vLLM may lack.
IMPORTS = """
annotated-doc apache-tvm-ffi blake3 cachetools cbor2 cloudpickle diskcache einops fastapi gguf interegular lark
llguidance lm-format-enforcer msgspec openai openai-harmony outlines_core partial-json-parser prometheus-client
py-cpuinfo pybase64 python-json-logger pyzmq starlette tiktoken uvloop xgrammar
"""
TAGS = ("manylinux_2_35_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux1_x86_64")
TINY_MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
    "max_position_embeddings": 512, "torch_dtype": "float32", "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip


def child(model: str, wished: float) -> dict[str, Any]:
    """In the engine's process: what vLLM does up to its config, with the CPU's platform for want of a GPU."""
    import inspect

    import vllm
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    before = str(inspect.signature(EngineArgs.create_engine_config))
    args = AsyncEngineArgs(model=model, gpu_memory_utilization=wished, skip_tokenizer_init=True)
    wrapped = EngineArgs.create_engine_config
    found: dict[str, Any] = {
        "version": vllm.__version__,
        "signature": str(inspect.signature(wrapped)),
        "same signature": str(inspect.signature(wrapped)) == before,
        "wrapped": hasattr(wrapped, "__wrapped__"),
        "overridden by AsyncEngineArgs": "create_engine_config" in vars(AsyncEngineArgs),
        "pipe directory": os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""),
    }
    # An engine's module is there before it asks for its config; then its constructor can be followed.
    missing = [why for name in ENGINES if (why := _cannot_import(*name))]
    for _ in range(2):
        try:
            found["config's utilization"] = args.create_engine_config().cache_config.gpu_memory_utilization
        except Exception as error:  # noqa: BLE001  # what the original misses here is part of the answer
            found["the original stopped at"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        found["utilization"] = args.gpu_memory_utilization
    found["engines that report when they are up"] = [name for module, name in ENGINES if _is_followed(module, name)]
    found["engines that cannot be imported here"] = missing
    return found


ENGINES = (("vllm.v1.engine.async_llm", "AsyncLLM"), ("vllm.v1.engine.llm_engine", "LLMEngine"))


def _cannot_import(module: str, name: str) -> str:
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, OSError) as error:
        return f"{name}: {str(error).splitlines()[0]}"
    return ""


def _is_followed(module: str, name: str) -> bool:
    engine = getattr(sys.modules.get(module), name, None)
    return engine is not None and hasattr(engine.__init__, "__wrapped__")


def check(version: str, folder: Path) -> dict[str, Any]:
    """One version, in folders of its own below `folder`."""
    source, imports = folder / version / "src", folder / "imports"
    if not source.exists():
        _pip("download", f"vllm=={version}", "--no-deps", "--only-binary=:all:", "--python-version=3.12",
             "--implementation=cp", "--abi=abi3", "--abi=cp38", *(f"--platform={tag}" for tag in TAGS),
             "--dest", str(folder / version))  # fmt: skip
        (wheel,) = (folder / version).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(source, [name for name in archive.namelist() if name.endswith((".py", ".json"))])
        wheel.unlink()
    if not imports.exists():
        _pip("install", "--no-deps", "--target", str(imports), *IMPORTS.split())
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(TINY_MODEL))
    return _run(version, folder, [source, imports])


def _run(version: str, folder: Path, paths: list[Path]) -> dict[str, Any]:
    run_id = new_run_id()
    mps_folder(run_id).make()
    answer = EngineAnswer(True, "joins", "/the/pipe/directory", 0.5)
    env = {**os.environ, "MPS_TRAINER_RUN": run_id, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "GPU-a"}
    # Only ours: Trinity has one too, and that one needs more of vLLM.
    env["VLLM_PLUGINS"] = "mps_trainer"
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *map(str, paths)])
    code = (
        f"import json, check_vllm_versions as c; print('FOUND' + json.dumps(c.child({str(folder / 'model')!r}, 0.9)))"
    )
    env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    with try_hold(run_paths(run_id).supervisor_lock) as _lock:
        server = SummonsServer(mps_folder(run_id).summons_socket, lambda _request: answer)
        try:
            done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
            told = [(e.wished, e.utilization, e.request.versions) for e in server.engines]
        finally:
            server.close()
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), None)
    if line is None:
        return {"version": version, "error": (done.stdout + done.stderr)[-3000:]}
    return {**json.loads(line.removeprefix("FOUND")), "told the supervisor": told}


def is_right(found: dict[str, Any]) -> bool:
    """Joined, lowered once, and the original was called with the lower number."""
    return (
        found.get("wrapped") is True
        and found["same signature"]
        and not found["overridden by AsyncEngineArgs"]
        and found["utilization"] == 0.5
        and found.get("config's utilization", 0.5) == 0.5
        and found["pipe directory"] == "/the/pipe/directory"
        and [tuple(told[:2]) for told in found["told the supervisor"]] == [(0.9, 0.5)]
    )


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], check=True, timeout=1200)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=["0.19.1", "0.23.0"])
    parser.add_argument("--folder", type=Path, help="keep what was downloaded there, for the next time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mt-vllm-", dir="/tmp") as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[STATE_DIR_VARIABLE] = f"{temporary}/s"
        right = True
        for version in options.versions:
            found = check(version, folder)
            right &= is_right(found)
            print(json.dumps({"right": is_right(found), **found}, indent=1))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

"""For gpu_weight_sync.py: a model of the wanted size, Trinity's engine with questions added, a sender of weights."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "cpu_rollout"
HIDDEN, MIDDLE, HEADS, VOCABULARY = 1024, 4096, 8, 32768
UTILIZATION = 0.5


class WeightDigest:
    """vLLM worker extension: two sums over the bits of all parameters; neither cares how vLLM fuses them."""

    def weight_digest(self) -> list[int]:
        return digest(parameter.data for parameter in self.model_runner.model.parameters())  # type: ignore[attr-defined]


def digest(tensors: Any) -> list[int]:
    """Sum and sum of squares of the 16-bit words of bfloat16 tensors, exact."""
    import torch

    total = [0, 0]
    for tensor in tensors:
        words = tensor.contiguous().view(torch.int16).to(torch.int64)
        total = [total[0] + int(words.sum()), total[1] + int((words * words).sum())]
    return total


def parameter_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """A Qwen2's parameters by their names in a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name in ("q", "k", "v"):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{layer}self_attn.{name}_proj.bias"] = (HIDDEN,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            shapes[f"{layer}mlp.{name}_proj.weight"] = (MIDDLE, HIDDEN)
        shapes[f"{layer}mlp.down_proj.weight"] = (HIDDEN, MIDDLE)
        shapes[f"{layer}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (HIDDEN,)
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def num_bytes(layers: int) -> int:
    return 2 * sum(math.prod(shape) for shape in parameter_shapes(layers).values())


def build_model_folder(work: Path, layers: int) -> None:
    """The example's tokenizer with the config of a larger model; vLLM makes its weights up."""
    sys.path.insert(0, str(EXAMPLE))
    from cpu_rollout import tiny_model

    tiny_model.build_tokenizer().save_pretrained(work / "model")
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
        "intermediate_size": MIDDLE, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    (work / "model" / "config.json").write_text(json.dumps(config))


def actors() -> tuple[Any, Any]:
    """Trinity's engine with two questions added, and the sender. Ray pickles both by value."""
    from trinity.common.models.vllm_model import vLLMRolloutModel

    class CheckedModel(vLLMRolloutModel):  # type: ignore[misc]
        async def facts(self) -> dict[str, Any]:
            config = self.async_llm.vllm_config
            return {
                "pid": os.getpid(),
                "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "pipe directory": os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""),
                "utilization": config.cache_config.gpu_memory_utilization,
            }

        async def weight_digest(self) -> list[int]:
            return list((await self._collective_rpc("weight_digest"))[0])

        async def logprobs_are_finite(self) -> bool:
            import torch

            found = await self.generate("The river follows the garden.", n=8, temperature=1.0)
            return all(bool(torch.isfinite(e.logprobs).all()) and len(e.logprobs) > 0 for e in found)

    class Sender:
        """What Trinity's verl worker does with weights, on rank 0 of the group."""

        def __init__(self, layers: int) -> None:
            import torch

            self.shapes = parameter_shapes(layers)
            self.device = torch.device("cuda:0")
            torch.cuda.set_device(self.device)
            self.weights: dict[str, Any] = {}

        def facts(self) -> dict[str, Any]:
            import torch

            return {
                "pid": os.getpid(),
                "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "gpu": "GPU-" + str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-"),
            }

        def address(self) -> tuple[str, int]:
            import socket

            import ray

            with socket.socket() as probe:
                probe.bind(("", 0))
                return str(ray.util.get_node_ip_address()), probe.getsockname()[1]

        def join(self, address: str, port: int) -> None:
            from trinity.utils.distributed import WeightTransferEngine

            self.group = WeightTransferEngine.create("vllm", address, port, 2, "weights")

        def draw(self, seed: int) -> list[int]:
            import torch

            generator = torch.Generator(self.device).manual_seed(seed)
            for name, shape in self.shapes.items():
                values = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32) * 0.02
                self.weights[name] = values.to(torch.bfloat16)
            torch.cuda.synchronize()
            return digest(self.weights.values())

        def send(self) -> None:
            import torch

            self.group.sync_weight(iter(self.weights.items()))
            torch.cuda.synchronize()

        def save(self, folder: str) -> None:
            from safetensors.torch import save_file

            Path(folder).mkdir(parents=True)
            save_file({name: tensor.cpu() for name, tensor in self.weights.items()}, f"{folder}/model.safetensors")

    return CheckedModel, Sender


def start_engine(cls: Any, work: Path, namespace: str, number: int, method: str) -> Any:
    import ray
    from trinity.common.config import InferenceModelConfig
    from trinity.common.constants import SyncMethod

    name = f"explorer_rollout_model_{number}_0"
    config = InferenceModelConfig(
        model_path=str(work / "model"), gpu_per_engine=1, enforce_eager=True, gpu_memory_utilization=UTILIZATION,
        max_model_len=256, max_prompt_tokens=128, max_response_tokens=48, min_response_tokens=1, temperature=1.0,
        top_p=1.0, top_k=-1, logprobs=0, repetition_penalty=1.0, ray_namespace=namespace, ray_actor_name=name,
        sync_method=SyncMethod(method), checkpoint_job_dir=str(work / "job"),
        extra_engine_args={"load_format": "dummy", "worker_extension_cls": "gpu_weight_actors.WeightDigest"},
    )  # fmt: skip
    return ray.remote(cls).options(name=name, num_gpus=1, namespace=namespace).remote(config=config)

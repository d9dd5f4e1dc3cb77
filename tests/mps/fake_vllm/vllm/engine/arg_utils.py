"""Part of the stand-in: arguments of an engine, which load the plugins when they are made."""

from dataclasses import dataclass

from mps_trainer.vllm_plugin import register


@dataclass
class EngineArgs:
    gpu_memory_utilization: float = 0.9

    def __post_init__(self):
        register()

    def create_engine_config(self, usage_context=None, headless=False):
        return {"gpu_memory_utilization": self.gpu_memory_utilization}

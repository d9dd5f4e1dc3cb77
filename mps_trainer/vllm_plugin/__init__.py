"""The entry point in vLLM's group `vllm.general_plugins`: lets a rollout engine share its GPU with the sidecar."""

from mps_trainer.vllm_plugin.plugin import register

__all__ = ["register"]

"""Stand-in: only the name is needed, for multi-modal prompts, which are refused."""


class ModelConfig:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("this is examples/cpu_rollout's stand-in for vllm; multi-modal needs vllm itself")

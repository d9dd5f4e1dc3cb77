"""Part of the stand-in: an engine that is up once its constructor returns."""


class AsyncLLM:
    def __init__(self, vllm_config):
        if vllm_config["gpu_memory_utilization"] < 0.1:
            raise ValueError("No available memory for the cache blocks")
        self.vllm_config = vllm_config

    @classmethod
    def from_engine_args(cls, engine_args):
        return cls(engine_args.create_engine_config())

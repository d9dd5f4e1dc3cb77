"""Not vLLM. trinity-rft 0.6 imports four names of vllm on its way to Explorer, whatever engine the YAML asks for."""

__version__ = "0.23.0"

"""Train a small auxiliary model on the GPU that vLLM already uses, inside a Trinity-RFT run."""

__version__ = "0.1.0"

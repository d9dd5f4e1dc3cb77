"""The sidecar on a GPU that vLLM shares: its memory, its numerics, and how it ends."""

"""CUDA MPS: the daemon, its clients' environment, leases of GPUs, and checks. No CUDA context is made here."""

"""Fixtures for every folder. Helpers are in tests/support, which pytest puts on the path."""

pytest_plugins = ["real_sidecar"]

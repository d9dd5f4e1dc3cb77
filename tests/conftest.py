"""Fixtures for every folder. Helpers are in tests/support, which pytest puts on the path."""

from __future__ import annotations

pytest_plugins = ["real_sidecar", "spread"]

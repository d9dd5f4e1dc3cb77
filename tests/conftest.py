"""Fixtures for every folder. Helpers are in tests/support, which pytest puts on the path."""

from __future__ import annotations

import signal

pytest_plugins = ["real_sidecar", "spread"]

# A shell without job control starts `scripts/test.sh &` with Ctrl-C ignored, and every process of a test inherits that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

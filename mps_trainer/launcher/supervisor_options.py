"""The command line of the supervisor's process, which only `start_run` writes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from mps_trainer.launcher.sidecar_process import SIDECAR_COMMAND

#: How long a sidecar may drain before it is stopped, seconds.
GRACE_S = 30.0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """`run_file` (Path), `report_fd`, `lock_fd` (a list), `grace` in seconds, `sidecar_command` (a list)."""
    parser = argparse.ArgumentParser(prog="python -m mps_trainer.launcher.supervisor")
    parser.add_argument("--run-file", type=Path, required=True)
    parser.add_argument("--report-fd", type=int)
    parser.add_argument("--lock-fd", type=int, action="append", default=[])
    parser.add_argument("--grace", type=float, default=GRACE_S)
    parser.add_argument("--sidecar-command", type=json.loads, default=list(SIDECAR_COMMAND))
    return parser.parse_args(argv)

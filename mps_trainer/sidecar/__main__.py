"""`python -m mps_trainer.sidecar --run-file PATH --ready-fd N [--go-fd N]`: started by the supervisor."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main() -> int:
    """Parse the arguments and run."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="mps_trainer.sidecar", description="Trains the auxiliary model of one run.")
    parser.add_argument("--run-file", type=Path, required=True, help="the run's JSON file in the state folder")
    parser.add_argument(
        "--ready-fd", type=int, default=-1, help="descriptor for JSON lines: waiting; then ready, or failed and why"
    )
    parser.add_argument(
        "--go-fd", type=int, default=-1, help="get warm, then wait for a byte here before anything touches a GPU"
    )
    arguments = parser.parse_args()
    from mps_trainer.sidecar.service import run

    return run(arguments.run_file, arguments.ready_fd, arguments.go_fd, begin)


if __name__ == "__main__":
    sys.exit(main())

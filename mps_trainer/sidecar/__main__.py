"""`python -m mps_trainer.sidecar --run-file PATH --ready-fd N`: started by the supervisor."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Parse the two arguments and run."""
    parser = argparse.ArgumentParser(prog="mps_trainer.sidecar", description="Trains the auxiliary model of one run.")
    parser.add_argument("--run-file", type=Path, required=True, help="the run's JSON file in the state folder")
    parser.add_argument(
        "--ready-fd", type=int, default=-1, help="descriptor for one JSON line: ready, or failed and why"
    )
    arguments = parser.parse_args()
    from mps_trainer.sidecar.service import run

    return run(arguments.run_file, arguments.ready_fd)


if __name__ == "__main__":
    sys.exit(main())

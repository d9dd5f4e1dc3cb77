"""The `mps-trainer` command. The only place that prints."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry of the console command."""
    # Imported here so that `import mps_trainer.cli` stays free of the command line's own packages.
    from mps_trainer.cli.app import run

    sys.exit(run(sys.argv[1:]))

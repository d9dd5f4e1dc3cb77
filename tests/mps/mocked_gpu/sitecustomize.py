"""With this folder on the path a supervisor starts the real sidecar with its GPU mocked (sidecar_on_cpu.py)."""

import sys
from pathlib import Path

if "mps_trainer.launcher.supervisor" in sys.orig_argv:
    from mps_trainer.launcher import sidecar_process

    sidecar_process.SIDECAR_COMMAND = (sys.executable, str(Path(__file__).parents[1] / "sidecar_on_cpu.py"))

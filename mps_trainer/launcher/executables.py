"""The commands of other packages, taken from the venv that this process runs in."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from mps_trainer.errors import RunError


def find_executable(name: str) -> str:
    """The path of `name` beside this Python, else on PATH; RunError says how to install it."""
    beside = Path(sys.executable).with_name(name)
    if beside.exists():
        return str(beside)
    on_path = shutil.which(name)
    if on_path is None:
        raise RunError(
            f"no command {name!r} beside {sys.executable} and none on PATH",
            "install Trinity into this venv: pip install -e '.[trinity]' in the clone of mps-trainer",
        )
    return on_path

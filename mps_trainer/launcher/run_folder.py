"""For a run whose folder somebody removes while it lives: the supervisor makes it again, so that the run can go on.

The sidecar opens its own files anew (`sidecar/run_folder.py`). Where the folder cannot be made again the status has its
spare place in the state folder, and a sidecar that dies is not replaced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from mps_trainer.run import RunRecord
from mps_trainer.run.made_again import OwnLog, make_again
from mps_trainer.run.private_files import write_private

log = logging.getLogger("mps_trainer.supervisor")
_SETTINGS = "settings.json"


class RunFolder:
    """Looks after one run's folder."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._run_dir = Path(record.run_dir)
        self._log = OwnLog(self._run_dir / "supervisor.log")
        self._why_not = ""

    def look(self) -> None:
        """Make it again if it is gone, or what we print into is; tried anew at each look. Two system calls."""
        settings = self._run_dir / _SETTINGS
        # Not Path.is_dir, which raises what a sick file server answers.
        whole = os.path.isdir(self._run_dir)
        if whole and not self._log.is_gone:
            return
        try:
            said = "supervisor.log was removed or moved; here it begins again"
            if not (whole and settings.exists()):
                said = make_again(self._run_dir)
                write_private(settings, json.dumps(self._record.settings, indent=2) + "\n")
                link_latest(self._run_dir)
            self._log.begin_again()
        except OSError as error:
            if str(error) != self._why_not:
                log.error("the run folder %s was removed and cannot be made again: %s", self._run_dir, error)
            self._why_not = str(error)
        else:
            self._why_not = ""
            log.error("%s", said)


def link_latest(run_dir: Path) -> None:
    """Let the link `latest` beside the run folders name this one. OSError when the disk refuses."""
    latest = run_dir.with_name(f".latest.{run_dir.name}")
    with contextlib.suppress(FileNotFoundError):
        latest.unlink()
    latest.symlink_to(run_dir.name)
    latest.replace(run_dir.with_name("latest"))

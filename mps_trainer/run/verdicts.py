"""Which experiences killed a sidecar: `verdicts.json` in the run folder.

Maker: the supervisor, between two lives. Eater: the next sidecar, which sets aside what is condemned
(`sidecar/set_aside.py`) instead of dying of it again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mps_trainer.run.doing import RecordRef, Stage, Subject
from mps_trainer.run.private_files import write_private

_FILE = "verdicts.json"


@dataclass(frozen=True)
class Verdict:
    """What is known of one subject that was in work when a sidecar died.

    Attributes:
        deaths: sidecars that died of it, or over it.
        cause: how the last one died, in words.
        condemned: it is to be set aside. False: a kill from outside, which proves nothing the first time.
    """

    stage: Stage
    subject: Subject
    deaths: int
    cause: str
    condemned: bool


def load_verdicts(run_dir: Path) -> list[Verdict]:
    """All verdicts of the run, oldest first; none when there is no file that we wrote and can read."""
    try:
        return [_verdict(item) for item in json.loads((run_dir / _FILE).read_text())]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def save_verdicts(run_dir: Path, verdicts: list[Verdict]) -> None:
    """Replace the file by rename; OSError when the disk refuses, and then the old one stands."""
    write_private(run_dir / _FILE, json.dumps([asdict(verdict) for verdict in verdicts], indent=1))


def _verdict(item: dict[str, Any]) -> Verdict:
    subject = item["subject"]
    record = RecordRef(**subject["record"]) if subject["record"] else None
    return Verdict(
        stage=Stage(item["stage"]),
        subject=Subject(subject["step"], record, tuple(subject["eids"])),
        deaths=item["deaths"],
        cause=item["cause"],
        condemned=item["condemned"],
    )

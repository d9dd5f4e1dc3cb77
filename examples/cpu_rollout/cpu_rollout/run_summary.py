"""What the quickstart prints at its end, read from the files that the sidecar and the operator left.

<run folder>/status.json      totals, first and last loss and AUC
<run folder>/metrics.jsonl    one line for each batch that the sidecar took in
<run folder>/operator.jsonl   one line for each batch that Trinity's operator saw, with all that it dropped
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def find_run_dir(work_dir: Path) -> Path | None:
    """The newest run folder under the work dir of a quickstart; None while there is none."""
    found = sorted(work_dir.glob("checkpoints/*/*.mps-trainer/*/"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def read_jsonl(path: Path) -> list[Line]:
    """The complete lines of a file that may still be written, or may not exist yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def print_summary(run_dir: Path, work_dir: Path) -> None:
    """The short report."""
    status = json.loads((run_dir / "status.json").read_text())
    metrics = [line for line in read_jsonl(run_dir / "metrics.jsonl") if line["kind"] == "batch"]
    batches = read_jsonl(run_dir / "operator.jsonl")
    picture = make_picture(run_dir, work_dir)
    entries = [
        ("experiences", describe_counts(status, batches)),
        ("loss", describe_course(line.get("loss") for line in metrics)),
        ("AUC", describe_course(line.get("auc") for line in metrics) + " (each batch before training on it)"),
        ("filter", describe_filter(batches)),
        *(("", line) for line in dropped_examples(batches)),
        ("TensorBoard", f"{short(run_dir / 'tensorboard')} (the sidecar)"),
        *(("", f"{short(path)} (Trinity)") for path in sorted(work_dir.glob("checkpoints/*/*/monitor/tensorboard"))),
        ("picture", picture),
        *(("page", short(path)) for path in sorted(run_dir.glob("*.html"))),
        ("run folder", short(run_dir)),
        ("next", "docs/tutorial.md: the same by hand, with a YAML and a task of your own"),
    ]
    print()
    for key, text in entries:
        print(f"{key:12} {text}")


def short(path: Path) -> str:
    """As seen from here, where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def describe_counts(status: Line, batches: list[Line]) -> str:
    """How many experiences went which way."""
    seen, fed = (sum(int(batch.get(key, 0)) for batch in batches) for key in ("seen", "fed"))
    return (
        f"{seen:,} seen, {fed:,} fed to the sidecar, {status['experiences']:,} received,"
        f" {status['trained']:,} drawn for training in {status['version']:,} steps"
    )


def describe_course(values: Iterable[float | None]) -> str:
    """First and last of a series, and its values between."""
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    return f"{known[0]:.3f} first, {known[-1]:.3f} last   [{' '.join(f'{value:.2f}' for value in known)}]"


def describe_filter(batches: list[Line]) -> str:
    """What the filter dropped, against what was planted."""
    dropped = [entry for batch in batches for entry in batch.get("dropped", ())]
    if not dropped:
        return "dropped nothing"
    planted = sum(int(entry.get("info", {}).get("planted", 0)) for entry in dropped)
    filtering = [batch for batch in batches if batch.get("dropped")]
    seen = sum(int(batch["seen"]) for batch in filtering)
    return (
        f"dropped {len(dropped):,} of {seen:,} (the {len(filtering)} batches since the model was ready):"
        f" {planted:,} planted outliers, {len(dropped) - planted:,} others"
    )


def dropped_examples(batches: list[Line], count: int = 2) -> list[str]:
    """Two of the dropped experiences, with the operator's reason."""
    last = [entry for batch in batches[-1:] for entry in batch.get("dropped", ())]
    return [
        f"e.g. {entry['eid']}: {entry.get('why', 'no reason given')}, score {entry['score']:.2f},"
        f" reward {entry.get('reward')}, {'planted' if entry.get('info', {}).get('planted') else 'not planted'}"
        for entry in sorted(last, key=lambda entry: -entry["score"])[:count]
    ]


def make_picture(run_dir: Path, work_dir: Path) -> str:
    """The PNG of `mps-trainer report`, or why there is none."""
    command = [str(Path(sys.executable).parent / "mps-trainer"), "report", str(run_dir)]
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    (work_dir / "report.log").write_text(answer.stdout + answer.stderr)
    pictures = sorted(run_dir.glob("*.png"))
    if answer.returncode != 0 or not pictures:
        return f"none: see {short(work_dir / 'report.log')}"
    return short(pictures[-1])

"""Which run folder somebody means, who names a folder above it, a config or a run id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mps_trainer.errors import RunError
from mps_trainer.launcher.runs import list_runs
from mps_trainer.launcher.trinity_config import read_trinity_config

_STATUS = "status.json"
_MOST_NAMED = 8


def find_run_dir(what: str, tell: Callable[[str], object] = lambda _: None) -> Path:
    """The run folder that is meant.

    Args:
        what: a run folder; a folder above run folders, of which the newest is taken; a Trinity YAML, likewise; the id
            of a live run.
        tell: called with a sentence when another folder is taken than the one that was named.

    Raises:
        RunError: there is none, or several configs' runs lie below; the message names them.
    """
    path = Path(what)
    if path.is_dir():
        return path if (path / _STATUS).exists() else _below(path, tell)
    if path.is_file():
        runs = read_trinity_config(path).runs_dir
        if not runs.is_dir():
            raise RunError(f"{what} has no run yet: there is no folder {runs}", f"start one: mps-trainer run {what}")
        return _below(runs, tell)
    for view in list_runs():
        if view.record.run_id == what:
            return Path(view.record.run_dir)
    raise RunError(
        f"there is no folder {what} and no live run of this id",
        "give a run folder, <checkpoint_root_dir>/<project>/<name>.mps-trainer/<run id>, or the folder above it",
    )


def _below(folder: Path, tell: Callable[[str], object]) -> Path:
    found = _runs_in(folder)
    if not found:
        # The checkpoint folder of Trinity, of a project, or of a group, say.
        above = [path for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}.mps-trainer")]
        with_runs = {path: runs for path in above if (runs := _runs_in(path))}
        if len(with_runs) > 1:
            names = ", ".join(map(str, sorted(with_runs)[:_MOST_NAMED]))
            raise RunError(f"below {folder} are the runs of several configs: {names}", "give one of these folders")
        found = next(iter(with_runs.values()), [])
    if not found:
        raise RunError(
            f"{folder} is no run folder and holds none ({_STATUS} does not exist)",
            "give a run folder, <name>.mps-trainer/<run id>; before the sidecar's first word there is nothing to see",
        )
    newest = found[-1]
    others = f" of {len(found)} runs" if len(found) > 1 else ""
    tell(f"{folder} is above the run folders; taking the newest{others}: {newest.name}")
    return newest


def _runs_in(folder: Path) -> list[Path]:
    """Oldest first; the link `latest` is not counted again."""
    runs = [path.parent for path in folder.glob(f"*/{_STATUS}") if not path.parent.is_symlink()]
    return sorted(runs, key=lambda run: (run / _STATUS).stat().st_mtime)

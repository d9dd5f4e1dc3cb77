"""Where results are kept: checked before anything starts, written after each round and at the end."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mps_trainer.bench.page import page
from mps_trainer.errors import ConfigError


class Saved:
    """OUT.json, OUT.md and OUT.png, each whole or not at all.

    Attributes:
        problem: why the place that was asked for does not do, found at the last write; "" when it does.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        self.problem = ""

    @property
    def png(self) -> Path:
        """Of the picture."""
        return self._path(".png")

    def keep(self, results: Mapping[str, Any]) -> None:
        """What there is so far, as JSON. A place that does not do now may do at the end, so nothing is raised."""
        try:
            self._write_json(results)
        except OSError as error:
            self.problem = str(error)

    def write(self, results: Mapping[str, Any]) -> list[Path]:
        """JSON, then Markdown; elsewhere, with `problem` set, where they cannot be written to the place asked for.

        Raises:
            OSError: nowhere.
        """
        self.problem = ""
        try:
            return [self._write_json(results), self.write_page(results)]
        except OSError as error:
            self.problem = str(error)
        self.where = Path(tempfile.mkdtemp(prefix="mps-trainer-bench-")) / (self.where.name or "results")
        return [self._write_json(results), self.write_page(results)]

    def write_page(self, results: Mapping[str, Any], *, picture: bool = False) -> Path:
        """The Markdown; `picture`: it shows the one beside it."""
        return self._put(".md", page(results, self.png.name if picture else ""))

    def _write_json(self, results: Mapping[str, Any]) -> Path:
        return self._put(".json", json.dumps(results, indent=1) + "\n")

    def _put(self, suffix: str, text: str) -> Path:
        path = self._path(suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        try:
            part.write_text(text)
            part.replace(path)
        except BaseException:
            # On a full disk half a file is in everybody's way.
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        return path

    def _path(self, suffix: str) -> Path:
        return self.where.with_name(self.where.name + suffix)


def require_writable(options_out: Path | None, work_dir: Path | None) -> None:
    """ConfigError when --out or --work-dir could not be written; makes neither."""
    if options_out is not None:
        if not options_out.name:
            raise ConfigError(f"--out {options_out} has no file name", "give one without a suffix: results/mine")
        for suffix in (".json", ".md", ".png"):
            path = options_out.with_name(options_out.name + suffix)
            if path.is_dir():
                raise ConfigError(f"--out {options_out}: {path} is a folder", "give another name")
        _require_folder(f"--out {options_out}", options_out.absolute().parent)
    if work_dir is not None:
        _require_folder(f"--work-dir {work_dir}", work_dir.absolute())


def _require_folder(what: str, folder: Path) -> None:
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        # Without a name: nothing is left of it, whatever happens.
        with tempfile.TemporaryFile(dir=there):
            return
    except OSError as error:
        found = "is no folder" if not there.is_dir() else f"cannot be written: {error.strerror}"
        raise ConfigError(f"{what}: {there} {found}", "name a place that you may write to") from None

"""The machine's memory, and a container's own limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from mps_trainer.run import host_memory
from mps_trainer.run.host_memory import read_memory


@pytest.mark.parametrize(
    ("limit", "used", "found"),
    [("1048576", "1000000", (1048576, 48576)), ("1048576", "2000000", (1048576, 0)), ("max", "5", None),
     (str(2**63 - 4096), "5", None)],
)  # fmt: skip
def test_a_limit_of_the_container_counts_and_its_absence_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, found: tuple[int, int] | None
) -> None:
    (tmp_path / "limit").write_text(f"{limit}\n")
    (tmp_path / "used").write_text(f"{used}\n")
    there = (str(tmp_path / "limit"), str(tmp_path / "used"))
    monkeypatch.setattr(host_memory, "_CGROUPS", ((str(tmp_path / "none"), str(tmp_path / "none")), there))
    total, available = read_memory()
    if found is not None:
        assert (total, available) == found
    else:
        assert total >= available > 2**20

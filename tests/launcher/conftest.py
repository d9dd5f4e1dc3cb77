"""Names, folders and small configs of a test's own; nothing of it is left behind."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_helpers import CONFIG, FAKE_SIDECAR

from mps_trainer.launcher import up
from mps_trainer.launcher.runs import end_runs, list_runs
from mps_trainer.run import STATE_DIR_VARIABLE


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder of the test's own; runs that a test left are ended, and a test that leaves files fails."""
    # pytest's tmp_path is longer than a Unix socket's path may be, above all with pytest-xdist.
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "s"
        monkeypatch.setenv(STATE_DIR_VARIABLE, str(folder))
        yield folder
        end_runs(list_runs(), timeout_s=90)
        left = sorted(path.name for path in (folder / "runs").glob("*"))
        assert not left, f"left in the state folder: {left}"


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Write a Trinity YAML: `write_config(("old", "new"), ..., name=...)`, each pair replaced in the text above."""

    def write(*changes: tuple[str, str], name: str = "run") -> Path:
        text = CONFIG.format(name=name, root=tmp_path / "ckpt")
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def long_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors that wait half a minute before a restart, so that a test cannot miss it."""
    code = (
        "import sys; from mps_trainer.launcher import restarts, supervisor; restarts._FIRST_BACKOFF_S = 30.0; "
        "sys.exit(supervisor.main())"
    )
    monkeypatch.setattr(up, "SUPERVISOR_COMMAND", (sys.executable, "-c", code))


@pytest.fixture
def fake() -> Callable[[str], list[str]]:
    """The command of a stand-in sidecar with a behaviour; see fake_sidecar.py."""
    return lambda behaviour: [sys.executable, str(FAKE_SIDECAR), behaviour]

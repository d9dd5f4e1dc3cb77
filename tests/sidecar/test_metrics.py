from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mps_trainer.sidecar.metrics import MetricsLog


@pytest.mark.parametrize(
    "failure", ["TypeError('Descriptors cannot be created directly')", "ImportError('no tensorboard')"]
)
def test_a_broken_tensorboard_costs_only_the_event_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    # As with a protobuf that the installed tensorboard was not made for: the import itself raises.
    broken = tmp_path / "site" / "tensorboard"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(f"raise {failure}\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "mps_trainer.sidecar.tensorboard", raising=False)
    monkeypatch.syspath_prepend(str(broken.parent))
    caplog.set_level("INFO")
    metrics = MetricsLog(tmp_path)
    metrics.open_tensorboard()
    metrics.write("batch", {"step": 3, "loss": 0.5})
    metrics.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.5
    assert failure.split("'")[1] in caplog.text


def test_numbers_in_objects_get_a_tag_each(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from mps_trainer.sidecar.tensorboard import EventFile, _numbers

    values = {"step": 3, "loss": 0.5, "auc": None, "dropped": {"oldest": 30, "newest": 0}, "scores": [0.1, 0.2]}
    assert dict(_numbers(values)) == {"step": 3, "loss": 0.5, "dropped/oldest": 30, "dropped/newest": 0}
    board = EventFile(tmp_path)
    board.write(1.0, 3, values)
    board.close()
    [path] = tmp_path.iterdir()
    content = path.read_bytes()
    assert b"sidecar/dropped/oldest" in content
    assert b"sidecar/step" not in content


def test_a_successor_keeps_the_picture_until_it_knows_better(tmp_path: Path) -> None:
    from mps_trainer.run import RunRecord, State, Status
    from mps_trainer.sidecar.service import _begin_status

    record = RunRecord(
        run_id="12345678", config="", derived_config="", run_dir=str(tmp_path), ray_namespace="", settings={}
    )
    assert _begin_status(record).version == 0
    before = Status(run_id="12345678", state=State.RESTARTING, version=80, restarts=1, error="killed", last_death="x")
    before.save(tmp_path)
    found = _begin_status(record)
    assert (found.state, found.version, found.restarts, found.error) == (State.STARTING, 80, 1, "")
    assert found.last_death == "x"
    (tmp_path / "status.json").write_text("{")
    assert _begin_status(record).version == 0

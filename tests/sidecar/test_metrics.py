from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mps_trainer.run import RunPaths, Status
from mps_trainer.sidecar.metrics import MetricsLog
from mps_trainer.sidecar.own_files import OwnFiles


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
    metrics = MetricsLog(OwnFiles(Status(run_id="r"), tmp_path))
    metrics.open_tensorboard()
    metrics.write("batch", {"step": 3, "loss": 0.5})
    metrics.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.5
    assert failure.split("'")[1] in caplog.text


def test_a_full_disk_costs_lines_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    own = OwnFiles(Status(run_id="r"), tmp_path)
    metrics = MetricsLog(own)
    for step in range(3):
        metrics.write("batch", {"step": step})
    assert caplog.text.count("metrics.jsonl cannot be written") == 1
    assert "No space left" in own.status.trouble
    metrics.close()


def test_a_folder_in_its_place_costs_lines_until_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    own = OwnFiles(Status(run_id="r"), tmp_path)
    metrics = MetricsLog(own)
    metrics.write("batch", {"step": 1})
    assert "Is a directory" in own.status.trouble
    (tmp_path / "metrics.jsonl").rmdir()
    metrics.write("batch", {"step": 2})
    metrics.close()
    assert own.status.trouble == ""
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [2]


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
    assert _begin_status(record, RunPaths(tmp_path / "state" / "r.json")).version == 0
    before = Status(run_id="12345678", state=State.RESTARTING, version=80, restarts=1, error="killed", last_death="x")
    before.trouble, before.score_age_s, before.score_latency_ms_p50 = "metrics.jsonl cannot be written", 3.0, 2.0
    before.save(tmp_path)
    found = _begin_status(record, RunPaths(tmp_path / "state" / "r.json"))
    assert (found.trouble, found.score_age_s, found.score_latency_ms_p50) == ("", None, None)
    assert (found.state, found.version, found.restarts, found.error) == (State.STARTING, 80, 1, "")
    assert found.last_death == "x"
    (tmp_path / "status.json").write_text("{")
    assert _begin_status(record, RunPaths(tmp_path / "state" / "r.json")).version == 0

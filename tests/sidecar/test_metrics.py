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

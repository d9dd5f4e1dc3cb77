"""status.json: whatever stands in it, `load` gives a Status or a RunError with what to do."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mps_trainer.errors import RunError
from mps_trainer.run import State, Status

GOOD = asdict(Status(run_id="12345678", state=State.READY))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    status = Status(run_id="12345678", state=State.READY, loss=0.5, resumed_from=3, error="x", ring_registered=False)
    status.save(tmp_path)
    assert Status.load(tmp_path) == status


def test_a_whole_number_is_a_float_too(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({**GOOD, "loss": 1, "updated": 5}))
    assert (Status.load(tmp_path).loss, Status.load(tmp_path).updated) == (1, 5)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"3", b"{}", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_file_that_is_no_status(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status.json").write_bytes(content)
    with pytest.raises(RunError, match=r"status\.json is no status") as caught:
        Status.load(tmp_path)
    assert caught.value.todo


@pytest.mark.parametrize(
    "changed",
    [{"state": "happy"}, {"state": []}, {"colour": 1}, {"restarts": "2"}, {"restarts": None}, {"restarts": True},
     {"loss": "low"}, {"error": None}, {"run_id": 1}, {"resumed_from": 1.5}, {"ring_registered": 1}],
)  # fmt: skip
def test_a_wrong_value_is_named(tmp_path: Path, changed: dict[str, Any]) -> None:
    (tmp_path / "status.json").write_text(json.dumps({**GOOD, **changed}))
    with pytest.raises(RunError, match="is no status") as caught:
        Status.load(tmp_path)
    assert any(str(word) in caught.value.message for word in (*changed.keys(), *changed.values()))


@pytest.mark.parametrize("key", ["run_id", "state"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    (tmp_path / "status.json").write_text(json.dumps({name: value for name, value in GOOD.items() if name != key}))
    with pytest.raises(RunError, match=f"it has no {key}"):
        Status.load(tmp_path)


def test_a_status_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    with pytest.raises(RunError, match=r"cannot read .*: Is a directory") as caught:
        Status.load(tmp_path)
    assert caught.value.todo

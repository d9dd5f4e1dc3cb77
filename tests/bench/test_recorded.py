"""A trace from what an engine noted of a real run; vLLM's side with a stand-in for its base class."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mps_trainer.bench.load import read_trace, write_trace
from mps_trainer.bench.recorded import Served, read_requests, to_load
from mps_trainer.errors import ConfigError
from mps_trainer.vllm_plugin import load_recorder


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm.v1.metrics.loggers"], "StatLoggerBase", object, raising=False)
    monkeypatch.setenv(load_recorder.RECORD_VARIABLE, str(tmp_path / "load"))
    return importlib.import_module("mps_trainer.vllm_plugin.load_recorder").LoadRecorder(None, 0)


def finished(prompt: int, response: int, took_s: float = 1.0) -> Any:
    return SimpleNamespace(e2e_latency=took_s, num_prompt_tokens=prompt, num_generation_tokens=response)


def test_an_engines_finished_requests_become_a_trace_with_a_stand_in_for_vllm(recorder: Any, tmp_path: Path) -> None:
    recorder.record(None, SimpleNamespace(finished_requests=[]))
    recorder.record(None, None)
    recorder.record(SimpleNamespace(), SimpleNamespace(finished_requests=[finished(7, 5), finished(9, 40, 3.0)]), 0)
    (path,) = (tmp_path / "load").iterdir()
    served = read_requests([path])
    assert [(one.prompt_tokens, one.response_tokens) for one in served] == [(9, 40), (7, 5)], "by arrival"
    assert served[0].end_s - served[0].arrival_s == pytest.approx(3.0, abs=1e-3)
    write_trace(to_load(served, "x"), tmp_path / "trace.jsonl")
    (batch,) = read_trace(tmp_path / "trace.jsonl").batches
    assert [(r.arrival_s, r.response_tokens) for r in batch.requests] == [(0.0, 40), (pytest.approx(2.0, abs=1e-2), 5)]


def test_a_record_that_cannot_be_written_never_reaches_the_engine_with_a_stand_in_for_vllm(
    recorder: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "load").write_text("a file is in the way")
    for _ in range(2):
        recorder.record(None, SimpleNamespace(finished_requests=[finished(1, 1)]))
    assert [entry.getMessage() for entry in caplog.records] == ["mps-trainer: the load is not recorded any more"]


def test_without_the_variable_there_is_no_recorder_and_vllms_log_keeps_quiet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(load_recorder.RECORD_VARIABLE, raising=False)
    log = logging.getLogger("vllm.plugins")
    try:
        load_recorder.LoadRecorder  # noqa: B018
    except AttributeError:
        log.exception("Failed to load plugin mps_trainer_record")
    else:
        pytest.fail("it exists")
    assert caplog.records == []
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        load_recorder.Other  # noqa: B018


def test_silence_parts_batches_and_is_their_gap() -> None:
    requests = [Served(0.0, 4.0, 8, 100), Served(0.1, 1.0, 8, 3), Served(4.2, 5.0, 8, 9), Served(7.0, 8.0, 8, 1)]
    load = to_load(requests, "real", quiet_s=0.5)
    assert [len(batch.requests) for batch in load.batches] == [3, 1], "0.2 s of silence part nothing"
    assert [batch.gap_s for batch in load.batches] == [2.0, 0.0]
    assert [request.arrival_s for request in load.batches[0].requests] == [0.0, 0.1, 4.2]


def test_a_line_that_is_no_request_is_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"arrival_s": 0.0, "end_s": 1.0, "prompt_tokens": 1, "response_tokens": 1}) + '\n{"ar')
    with pytest.raises(ConfigError, match="line 2 is no request"):
        read_requests([path])
    with pytest.raises(ConfigError, match="no request was recorded"):
        read_requests([])


@pytest.mark.parametrize(
    ("name", "value"),
    [("arrival_s", "NaN"), ("end_s", "Infinity"), ("end_s", "-1"), ("arrival_s", '"x"'), ("response_tokens", "-3"),
     ("prompt_tokens", "null"), ("response_tokens", "Infinity")],
)  # fmt: skip
def test_a_request_that_cannot_have_been_is_named(tmp_path: Path, name: str, value: str) -> None:
    row = {"arrival_s": "0.0", "end_s": "1.0", "prompt_tokens": "1", "response_tokens": "1", name: value}
    path = tmp_path / "requests.jsonl"
    path.write_text("{" + ", ".join(f'"{key}": {said}' for key, said in row.items()) + "}\n")
    with pytest.raises(ConfigError, match="line 1 is no request"):
        read_requests([path])


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="line 1 is no request"):
        read_requests([path])


@pytest.mark.parametrize(
    ("name", "value"),
    [("arrival_s", "NaN"), ("arrival_s", "Infinity"), ("gap_s", "NaN"), ("gap_s", "1e300"), ("response_tokens", "1e12"),
     ("response_tokens", "Infinity"), ("batch", "Infinity")],
)  # fmt: skip
def test_a_trace_that_would_never_end_is_refused(tmp_path: Path, name: str, value: str) -> None:
    row = {"batch": "0", "arrival_s": "0", "gap_s": "0", "prompt_tokens": "1", "response_tokens": "1", name: value}
    path = tmp_path / "trace.jsonl"
    path.write_text("{" + ", ".join(f'"{key}": {said}' for key, said in row.items()) + "}\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_trace(path)


def test_two_engines_with_one_pid_have_files_of_their_own_with_a_stand_in_for_vllm(
    recorder: Any, tmp_path: Path
) -> None:
    again = type(recorder)(None, 0)
    for one in (recorder, again):
        one.record(None, SimpleNamespace(finished_requests=[finished(1, 1)]))
    assert len(list((tmp_path / "load").iterdir())) == 2

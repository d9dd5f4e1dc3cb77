"""Metrics over HTTP: what a scrape gives, and what a taken port costs. A real run: tests/cli/test_commands.py."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mps_trainer.config import Settings
from mps_trainer.errors import ConfigError
from mps_trainer.launcher import prometheus
from mps_trainer.launcher.prometheus import check_prometheus, serving
from mps_trainer.run import RunRecord, State, Status, run_paths, try_hold

RUN_ID = "0123abcd"
SAMPLE = re.compile(r"^(?P<name>[a-z_]+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_record(run_dir: Path, port: int | None) -> RunRecord:
    settings = {**Settings().dump(), "prometheus_port": port}
    return RunRecord(
        run_id=RUN_ID, config="x.yaml", derived_config="", run_dir=str(run_dir), ray_namespace="", settings=settings
    )


def scrape(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        text = answer.read().decode()
    found = [SAMPLE.match(line) for line in text.splitlines() if not line.startswith("#")]
    assert all(found), text
    samples = [match for match in found if match is not None]
    assert all(f'run_id="{RUN_ID}"' in match["labels"] for match in samples)
    return {(m["name"], without_run_id(m["labels"])): float(m["value"]) for m in samples}


def without_run_id(labels: str) -> str:
    return ",".join(label for label in labels.split(",") if not label.startswith("run_id="))


def test_a_scrape_tells_what_the_run_folder_says(tmp_path: Path) -> None:
    port, told = free_port(), []
    status = Status(
        run_id=RUN_ID, state=State.READY, version=80, restarts=2, experiences=2560, loss=0.25, memory_bytes=2**20,
        lost_oldest=30, backlog=3, backlog_age_s=1.5,
    )  # fmt: skip
    status.save(tmp_path)
    line = {"seen_total": 2560, "removed_total": 84, "late_total": 5, "score_wait_ms": 6.0}
    (tmp_path / "operator.jsonl").write_text(json.dumps(line) + "\n")
    paths = run_paths(RUN_ID)
    with serving(make_record(tmp_path, port), paths, told.append):
        found = scrape(port)
        assert found["mps_trainer_sidecar_up", ""] == 0
        lock = try_hold(paths.sidecar_lock)
        assert lock is not None
        with lock:
            assert scrape(port)["mps_trainer_sidecar_up", ""] == 1
        paths.remove()
        # The sidecar is replaced, and the file with it.
        Status(run_id=RUN_ID, state=State.RESTARTING, version=80, loss=None).save(tmp_path)
        assert ("mps_trainer_loss", "") not in scrape(port)
    assert told == [f"Prometheus metrics at http://127.0.0.1:{port}/metrics"]
    expected = {
        ("mps_trainer_run_info", 'device="cpu",mps="off",task="preference_classifier"'): 1,
        ("mps_trainer_sidecar_state", 'state="ready"'): 1,
        ("mps_trainer_sidecar_state", 'state="failed"'): 0,
        ("mps_trainer_sidecar_restarts_total", ""): 2,
        ("mps_trainer_experiences_received_total", ""): 2560,
        ("mps_trainer_experiences_lost_total", 'policy="oldest"'): 30,
        ("mps_trainer_experiences_removed_total", ""): 84,
        ("mps_trainer_experiences_late_total", ""): 5,
        ("mps_trainer_model_version", ""): 80,
        ("mps_trainer_loss", ""): 0.25,
        ("mps_trainer_backlog_records", ""): 3,
        ("mps_trainer_backlog_age_seconds", ""): 1.5,
        ("mps_trainer_memory_resident_bytes", ""): 2**20,
        ("mps_trainer_score_latency_seconds", 'quantile="0.99"'): 0.006,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert ("mps_trainer_auc", "") not in found, "a number that does not exist is not told"
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    assert [name for name, _ in found if f"`{name}`" not in page] == []


def test_a_taken_port_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(make_record(tmp_path, port), run_paths(RUN_ID), told.append):
            pass
    assert "Address already in use; the run goes on" in told[0]


@pytest.mark.parametrize("port", [None, 0])
def test_it_is_off_by_default(tmp_path: Path, port: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: Any) -> None:
        pytest.fail("a server was started")

    monkeypatch.setattr(prometheus, "_start", no)
    assert Settings().prometheus_port is None
    with serving(make_record(tmp_path, port), run_paths(RUN_ID), no):
        pass


def test_a_missing_package_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    check_prometheus(Settings(prometheus_port=9400))
    monkeypatch.setattr(prometheus.importlib.util, "find_spec", lambda _: None)
    check_prometheus(Settings())
    with pytest.raises(ConfigError, match=r"not installed") as caught:
        check_prometheus(Settings(prometheus_port=9400))
    assert "[prometheus]" in caught.value.todo


def totals(operator: str, seen: int) -> str:
    return json.dumps({"operator": operator, "seen_total": seen, "removed_total": 0}) + "\n"


def test_counters_do_not_fall_when_a_sidecar_or_an_operator_begins_again(tmp_path: Path) -> None:
    port = free_port()
    names = ("experiences_received", "experiences_trained", "experiences_seen")
    log = tmp_path / "operator.jsonl"

    def counters() -> list[float]:
        found = scrape(port)
        assert found["mps_trainer_model_version", ""] == Status.load(tmp_path).version
        lost = found["mps_trainer_experiences_lost_total", 'policy="oldest"']
        return [*(found[f"mps_trainer_{name}_total", ""] for name in names), lost]

    def say(version: int, experiences: int, lost: int) -> None:
        Status(
            run_id=RUN_ID, version=version, experiences=experiences, trained=8 * version, lost_oldest=lost
        ).save(tmp_path)  # fmt: skip

    with serving(make_record(tmp_path, port), run_paths(RUN_ID), lambda _: None):
        say(100, 1000, 30)
        log.write_text(totals("aa", 1000))
        assert counters() == [1000, 800, 1000, 30]
        # From a checkpoint, and the operator with it.
        say(80, 700, 0)
        with log.open("a") as file:
            file.write(totals("bb", 50))
        assert counters() == [1000, 800, 1050, 30]
        say(120, 1100, 31)
        with log.open("a") as file:
            file.write(totals("bb", 100))
        assert counters() == [1100, 960, 1100, 31]


@pytest.mark.parametrize(
    ("version", "refused"), [("0.18.0", True), ("0.9", True), ("0.19.0", False), ("1.2rc1", False)]
)
def test_an_old_client_is_refused_before_the_run_and_ends_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    monkeypatch.setattr(prometheus.importlib.metadata, "version", lambda _: version)
    told: list[str] = []
    if not refused:
        check_prometheus(Settings(prometheus_port=9400))
        return
    with pytest.raises(ConfigError, match=rf"prometheus-client {version} is installed, which is older than 0\.19"):
        check_prometheus(Settings(prometheus_port=9400))
    check_prometheus(Settings())
    with serving(make_record(tmp_path, free_port()), run_paths(RUN_ID), told.append):
        pass
    assert version in told[0]
    assert "the run goes on" in told[0]


def test_whatever_the_client_does_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import prometheus_client

    # What it gave before 0.19.
    monkeypatch.setattr(prometheus_client, "start_http_server", lambda *_: None)
    told: list[str] = []
    with serving(make_record(tmp_path, free_port()), run_paths(RUN_ID), told.append):
        pass
    assert "cannot unpack non-iterable NoneType object; the run goes on" in told[0]

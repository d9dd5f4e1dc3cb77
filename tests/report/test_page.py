"""The HTML page of a run: whole, by itself, true in the odd cases. What it looks like a person has to see."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_report import ODD_VALUES, batch_line, operator_line, write_run

from mps_trainer.config import Settings
from mps_trainer.errors import RunError
from mps_trainer.report import describe, summarize, write_page
from mps_trainer.report.history import read_history
from mps_trainer.run import STATE_DIR_VARIABLE, State, Status, run_paths, try_hold

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Checker(HTMLParser):
    """Tags that match, ids that are unique, and every address that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                self.references.append(value or "")
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / "state"))


def page_of(run_dir: Path) -> Checker:
    page = write_page(run_dir, run_dir / "report.html")
    assert page.stat().st_mode & 0o777 == 0o600, "it names experiences"
    source = page.read_text()
    checker = Checker()
    checker.feed(source)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    # Inside the page only: no network, no other file.
    assert {reference[:1] for reference in checker.references} <= {"#"}
    assert {reference[1:] for reference in checker.references} <= set(checker.ids)
    assert "<script" not in source
    assert not re.findall(r"#01010[1-6]|#0[234]{5}", source), "a stand-in colour is left"
    return checker


def rich_run(run_dir: Path) -> None:
    extra = {"backlog": 2, "memory_bytes": 4e8, "learning_rate": 0.1}
    batches = [batch_line(i, **extra | {"learning_rate": 1 / i}) for i in range(1, 81)]
    operator: list[dict[str, Any]] = [
        operator_line(i)
        | {"score_wait_ms": 5.0 + i, "score_age_s": 1.0, "scored": 128, "filter_limit": 0.9, "reward_mean": 0.5,
           "reward_mean_kept": 0.6, "rewards": [0, 0.2, 0.5, 0.8, 1], "rewards_kept": [0, 0.3, 0.6, 0.8, 1]}
        for i in range(1, 81)
    ]  # fmt: skip
    write_run(run_dir, batches, operator)
    (run_dir / "settings.json").write_text(json.dumps({**Settings().dump(), "use": "filter", "memory": 2**30}))
    (run_dir / "machine.json").write_text(json.dumps({"host": "node<7>", "GPUs": ["none"]}))


def test_the_page_of_a_run_with_everything(tmp_path: Path) -> None:
    rich_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "pause", "t": 150.0, "step": 4, "paused": 1, "reason": "process 7"}) + "\n")
    stamps = [time.strftime("%Y-%m-%d %H:%M:%S,000", time.localtime(100 + 10 * i)) for i in range(5)]
    told = ["sidecar 7 started", "sidecar 7 is ready", "sidecar 7 ended: it was killed", "sidecar 8 started", "other"]
    log = "".join(f"{stamp} {text}\n" for stamp, text in zip(stamps, told, strict=True))
    (tmp_path / "run" / "supervisor.log").write_text(f"no time\n{log}")
    (tmp_path / "run" / "set_aside").mkdir()
    (tmp_path / "run" / "set_aside" / "step-4.json").write_text('{"experiences": 3, "cause": "a <b>crash</b>"}')
    checker = page_of(tmp_path / "run")
    titles = (
        "Training loss", "AUC", "Rewards before and after", "Scores", "Taken out", "Backlog", "Score latency",
        "Score age", "Memory", "Learning rate", "Lives of the sidecar", "Events", "Settings", "Machine",
    )  # fmt: skip
    assert [title for title in titles if title not in checker.text] == []
    assert "3 experiences set aside (step-4): a <b>crash</b>" in checker.text, "shown as text, not as markup"
    assert "paused: process 7" in checker.text
    assert "node<7>" in checker.text
    assert "quantile 0.1" in checker.text
    assert len([tag for tag in checker.ids if tag.endswith("figure_1")]) == 11
    history = read_history(tmp_path / "run")
    assert [(life.pid, life.how, life.ready is None) for life in history.lives] == [
        (7, "ended: it was killed", False), (8, "", True),
    ]  # fmt: skip


def test_the_page_of_a_run_without_a_batch(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [], [])
    Status(run_id="12345678", state=State.FAILED, error="the loss is nan").save(tmp_path / "run")
    text = page_of(tmp_path / "run").text
    assert "No batch has reached the sidecar" in text
    assert "The sidecar failed: the loss is nan" in text
    assert "There is nothing to draw" in text


def test_the_page_of_a_run_that_goes_on_or_was_killed(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [batch_line(1)], [])
    Status(run_id="12345678", state=State.READY, batches=1, version=4).save(tmp_path / "run")
    assert "it was killed" in page_of(tmp_path / "run").text
    lock = try_hold(run_paths("12345678").supervisor_lock)
    assert lock is not None
    with lock:
        assert "still going on" in page_of(tmp_path / "run").text


USES = [
    ({"use": "feed"}, {}, "use: feed only trains"),
    ({"use": "reward"}, {}, "corrects rewards and drops nothing"),
    ({"use": "filter"}, {"score_too_early": 1}, "scores count from model version 50 on, and the model got to 80"),
    ({"use": "filter", "warmup_steps": 9}, {"score_too_early": 1}, "and from batch 10 on"),
    ({"use": "filter"}, {"scored": 0}, "no batch got scores"),
    ({"use": "filter", "filter": {"value": 0.001}}, {}, "a share of 0.001 of a batch"),
    ({"use": "filter", "filter": {"drop": "threshold", "value": 7}}, {}, "no score was above filter.value, 7"),
    ({"use": "filter", "filter": {"drop": "top_k", "value": 0}}, {}, "filter.drop is top_k with value 0"),
]


@pytest.mark.parametrize(("settings", "line", "why"), USES)
def test_dropped_nothing_is_explained(tmp_path: Path, settings: dict[str, Any], line: dict[str, Any], why: str) -> None:
    operator = [{"t": 1, "batch": 1, "seen": 128, "fed": 128, "dropped": [], "scored": 128, **line}]
    write_run(tmp_path / "run", [batch_line(1)], operator)
    (tmp_path / "run" / "settings.json").write_text(json.dumps(Settings.model_validate(settings).dump()))
    assert why in dict(describe(summarize(tmp_path / "run")))["filter"]


def test_a_run_whose_operator_never_came(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [batch_line(1)], [])
    (tmp_path / "run" / "settings.json").write_text(json.dumps({"use": "filter"}))
    assert "the operator never wrote a line" in dict(describe(summarize(tmp_path / "run")))["filter"]


def test_values_of_a_wrong_type_cost_no_page(tmp_path: Path) -> None:
    rich_run(tmp_path / "run")
    names = ("t", "step", "backlog", "memory_bytes", "gpu_memory_bytes", "learning_rate", "scores", "dropped", "loss")
    lines = [{**batch_line(90), name: value} for name in names for value in ODD_VALUES]
    own = ("t", "dropped", "score_wait_ms", "score_age_s", "late", "scored", "filter_limit", "rewards", "reward_mean")
    told = [{**operator_line(9), name: value} for name in own for value in ODD_VALUES]
    told += [
        {**operator_line(9), "dropped": [{"eid": v, "score": v, "why": v, "reward": v, "info": v}]} for v in ODD_VALUES
    ]
    for name, more in (("metrics.jsonl", lines), ("operator.jsonl", told)):
        with (tmp_path / "run" / name).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in more))
    for name in ("settings.json", "machine.json", "supervisor.log"):
        (tmp_path / "run" / name).write_bytes(b'{"memory": [], "task": {}, "use": 1, "filter": 3, "a": "<b>"}')
    page_of(tmp_path / "run")


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        write_page(tmp_path, tmp_path / "x.html")

"""Following files that grow, and the figures of a run from them."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mps_trainer.run import State, Status
from mps_trainer.run.figures import Watcher
from mps_trainer.run.operator_totals import OperatorTotals
from mps_trainer.run.tail import Tail


def append(path: Path, *lines: Any) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def test_each_line_comes_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    append(path, {"a": 1}, {"a": 2})
    assert tail.read() == [{"a": 1}, {"a": 2}]
    with path.open("a") as file:
        file.write('{"a": 3')
    assert tail.read() == []
    with path.open("a") as file:
        file.write('}\n[1]\nnull\nx\n{"a": 4}\n')
    assert tail.read() == [{"a": 3}, {"a": 4}]


def test_the_first_look_is_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, *({"a": i} for i in range(1000)))
    found = Tail(path, most=100).read()
    assert 5 < len(found) < 12
    assert found[-1] == {"a": 999}
    assert [b["a"] - a["a"] for a, b in pairwise(found)] == [1] * (len(found) - 1)


def test_a_later_look_at_much_growth_is_at_the_end_too(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, {"a": 0})
    tail = Tail(path, most=100)
    assert tail.read() == [{"a": 0}]
    append(path, *({"a": i} for i in range(1, 1000)))
    found = tail.read()
    assert 5 < len(found) < 12
    assert found[-1] == {"a": 999}
    append(path, {"a": 1000})
    assert tail.read() == [{"a": 1000}]
    # A line that is longer than a look is lost, and the one after it comes.
    append(path, {"a": "x" * 300})
    assert tail.read() == []
    append(path, {"a": 1001})
    assert tail.read() == [{"a": 1001}]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, {"a": 1}, {"a": 2})
    tail = Tail(path)
    tail.read()
    path.write_text('{"a": 9}\n')
    assert tail.read() == [{"a": 9}]
    path.unlink()
    assert tail.read() == []


def batch(when: float, step: int) -> dict[str, Any]:
    return {
        "kind": "batch",
        "t": when,
        "step": step,
        "batch": step // 4,
        "experiences": 64 * step,
        "loss": 1 / step,
        "auc": 0.5,
    }


def test_rates_are_of_the_last_half_minute_and_fall_to_nothing(tmp_path: Path) -> None:
    now = time.time()
    append(tmp_path / "metrics.jsonl", *(batch(now - 60 + i, 4 * (i + 1)) for i in range(60)))
    Status(run_id="12345678", state=State.READY, version=240, experiences=64 * 240).save(tmp_path)
    figures = Watcher(tmp_path).look()
    assert figures.steps_per_s == pytest.approx(4, rel=0.3)
    assert figures.experiences_per_s == pytest.approx(256, rel=0.3)
    assert (len(figures.losses), len(figures.aucs)) == (60, 60)
    # The same without a word for a minute: nothing has been learned since.
    (tmp_path / "metrics.jsonl").write_text("")
    append(tmp_path / "metrics.jsonl", *(batch(now - 120 + i, 4 * (i + 1)) for i in range(60)))
    assert Watcher(tmp_path).look().steps_per_s == 0


def test_steps_that_go_back_to_a_checkpoint_are_no_negative_rate(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", batch(time.time() - 20, 400), batch(time.time() - 5, 100))
    Status(run_id="12345678", version=100).save(tmp_path)
    assert Watcher(tmp_path).look().steps_per_s == 0


def test_between_two_lives_the_last_word_stays(tmp_path: Path) -> None:
    Status(run_id="12345678", version=7).save(tmp_path)
    watcher = Watcher(tmp_path)
    assert watcher.look().status is not None
    (tmp_path / "status.json").unlink()
    status = watcher.look().status
    assert status is not None
    assert status.version == 7


def test_the_operators_last_line_has_the_totals(tmp_path: Path) -> None:
    for i in range(1, 101):
        line = {"seen_total": 256 * i, "removed_total": 12 * i, "late_total": i, "score_wait_ms": float(i)}
        append(tmp_path / "operator.jsonl", line)
    figures = Watcher(tmp_path).look()
    assert (figures.seen, figures.removed, figures.late) == (25_600, 1_200, 100)
    assert (figures.score_wait_ms_p50, figures.score_wait_ms_p99) == (51, 100)
    assert figures.status is None
    assert json.dumps(figures.to_json())


def told(operator: str, seen: int, **more: Any) -> dict[str, Any]:
    return {"operator": operator, "t": 1.0, "dropped": [], "seen_total": seen, "removed_total": seen // 4, **more}


def test_the_totals_are_of_all_operators_dead_ones_too(tmp_path: Path) -> None:
    path = tmp_path / "operator.jsonl"
    watcher = Watcher(tmp_path)
    append(path, told("aa", 64), told("bb", 8), told("aa", 128))
    figures = watcher.look()
    assert (figures.seen, figures.removed, figures.late) == (136, 34, None)
    # One is killed amid a line, and its successor goes on in it; the other one has its scores late.
    with path.open("a") as file:
        file.write(json.dumps(told("bb", 16))[:40])
    append(path, told("cc", 4))
    assert watcher.look().seen == 136
    append(path, told("cc", 8), told("aa", 192, late_total=3))
    figures = watcher.look()
    assert (figures.seen, figures.removed, figures.late) == (208, 52, 3)
    assert figures == Watcher(tmp_path).look(), "who comes later is told the same"


def test_an_operator_that_has_long_been_dead_still_counts(tmp_path: Path) -> None:
    append(tmp_path / "operator.jsonl", told("aa", 1000), *(told("bb", i, eid="x" * 1000) for i in range(500)))
    figures = Watcher(tmp_path).look()
    assert figures.seen == 1499


def test_lines_without_an_identity_or_without_sense_harm_no_total(tmp_path: Path) -> None:
    path = tmp_path / "operator.jsonl"
    totals = OperatorTotals(path)
    totals.read()
    assert totals.total("seen_total") is None
    append(path, {"seen_total": 5}, {"seen_total": 7}, told("aa", 1), [1], {"operator": "aa", "seen_total": "many"})
    with path.open("a") as file:
        file.write('x\n{"operator": "aa", "seen_to')
    totals.read()
    assert totals.total("seen_total") == 8

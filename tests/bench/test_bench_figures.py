"""From windows to figures, with windows whose figures are known."""

from __future__ import annotations

import re
from typing import Any

import pytest
from bench_helpers import session, window

from mps_trainer.bench.figures import figures, idle_cost, quantile
from mps_trainer.bench.page import page
from mps_trainer.bench.picture import draw
from mps_trainer.bench.run import right

ROUNDS = range(3)


def rows_of(windows: list[dict[str, Any]], engines: int = 1) -> dict[str, dict[str, Any]]:
    found = figures(session(windows, [20.0, 20.0, 40.0]), batch_size=256, engines_here=engines)
    return {row["arm"]: row for row in found}


def two_arms(name: str = "sidecar-cpu", **more: Any) -> list[dict[str, Any]]:
    # The machine is half as fast in the last round; the arm loses a fifth of the rollout in every one.
    slow = [1.0, 1.0, 2.0]
    solo = [window("none", i, seconds=slow[i]) for i in ROUNDS]
    return solo + [window(name, i, seconds=1.25 * slow[i], steps=35, score_ms=[5.0, 9.0], **more) for i in ROUNDS]


def test_shares_are_of_the_same_round() -> None:
    row = rows_of(two_arms())["sidecar-cpu"]
    assert row["rollout_kept"] == pytest.approx({"median": 0.8, "min": 0.8, "max": 0.8, "n": 3})
    assert row["tokens_per_s"]["median"] == pytest.approx(80)
    assert row["batch_s"]["max"] == pytest.approx(2.5)
    # 35 steps in 1.75 s, gap included, are 20 a second.
    assert row["steps_per_s"]["median"] == pytest.approx(20)
    assert row["of_dedicated"]["max"] == pytest.approx(1.0)
    assert row["of_dedicated"]["min"] == pytest.approx(35 / 3.0 / 40)
    assert row["experiences_per_percent"] == pytest.approx(20 * 256 / 20)
    assert (row["score_ms_p50"], row["score_ms_p99"], row["scores"]) == (9.0, 9.0, 6)
    assert row["token_ms_p99"]["median"] == pytest.approx(25)
    assert row["cpu_per_s"]["engine"] == pytest.approx(1.25 / 1.75)


def test_the_solo_arm_keeps_all_and_trains_nothing() -> None:
    row = rows_of(two_arms())["none"]
    assert row["rollout_kept"]["median"] == 1.0
    assert row["steps_per_s"] is row["of_dedicated"] is row["experiences_per_percent"] is None


def test_a_gpu_of_its_own_counts_as_a_lost_engine() -> None:
    assert rows_of(two_arms("own-gpu"), engines=2)["own-gpu"]["rollout_kept"]["median"] == pytest.approx(0.4)


def test_nothing_is_divided_by_a_loss_that_is_none() -> None:
    windows = [window(name, i, seconds=1.0, steps=9) for i in ROUNDS for name in ("none", "sidecar-cpu")]
    assert rows_of(windows)["sidecar-cpu"]["experiences_per_percent"] is None


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"batch": {"digest": "other"}}, "differ"),
        ({"batch": {"not_finite": 1}}, "not_finite"),
        ({"batch": {"tokens": 99}}, "wrong_length"),
        ({"problem": "2 scores are not finite"}, "problems"),
        ({"pace_source": "nvml"}, "problems"),
        ({"pace_source": ""}, "problems"),
    ],
)
def test_wrong_outputs_are_seen(more: dict[str, Any], what: str) -> None:
    outputs = rows_of(two_arms(**more))["sidecar-cpu"]["outputs"]
    assert outputs[what]
    assert not outputs["right"]
    assert rows_of(two_arms())["sidecar-cpu"]["outputs"]["right"]


def test_a_pace_that_hears_the_engine_is_right_and_another_source_is_named() -> None:
    assert rows_of(two_arms(pace_source="engine"))["sidecar-cpu"]["outputs"]["right"]
    problems = rows_of(two_arms(pace_source="nvml"))["sidecar-cpu"]["outputs"]["problems"]
    assert problems[0] == "the pace went by nvml, not by the engine"


def test_tokens_that_depend_on_the_clock_are_not_compared() -> None:
    outputs = rows_of(two_arms(batch={"digest": "other", "comparable": False}))["sidecar-cpu"]["outputs"]
    assert (outputs["compared"], outputs["right"]) == (0, True)


def test_an_arm_that_never_takes_a_step_is_wrong() -> None:
    windows = [window(name, i, seconds=1.0) for i in ROUNDS for name in ("none", "sidecar-cpu")]
    assert rows_of(windows)["sidecar-cpu"]["outputs"]["problems"] == ["no training step in any round"]


def test_what_rests_costs_one_percent() -> None:
    [row] = idle_cost(session([], [])["closing"])
    assert row["cost"] == pytest.approx(0.01)
    assert row["idle until"] == "trainers ended"


@pytest.mark.parametrize(
    ("with_them", "verdict"),
    [([1.0, 1.002, 1.004], "yes"), ([1.009, 1.01, 1.011], "no"), ([0.9, 1.0, 1.1], "not resolved")],
)
def test_half_a_percent_is_judged_only_where_it_can_be_seen(with_them: list[float], verdict: str) -> None:
    results = results_of(two_arms())
    blocks = [{"what": "all there", "seconds": with_them}, {"what": "trainers ended", "seconds": [1.0]}]
    results["sessions"][0]["idle"] = idle_cost(blocks)
    [line] = [line for line in page(results).splitlines() if line.startswith("| trainers ended")]
    assert verdict in line.split("|")[3]


def test_quantiles_are_values_that_are_there() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(list(map(float, range(100))), 0.99) == 99.0
    assert quantile([], 0.5) is None


def results_of(windows: list[dict[str, Any]]) -> dict[str, Any]:
    raw = session(windows, [20.0, 20.0, 40.0])
    rows = figures(raw, batch_size=256, engines_here=1)
    one = {**raw, "rows": rows, "idle": idle_cost(raw["closing"]), "asked": 5, "dedicated": "sidecar-cpu"}
    return {
        "command": "benchmark --x", "machine": {"Cores": "2"}, "load_average": [0.5, 1.0], "notes": ["a note"],
        "sessions": [one], "left_out": {"mps-low": "there is no GPU"},
    }  # fmt: skip


def test_the_page_has_a_line_for_each_arm_and_says_what_is_missing() -> None:
    text = page(results_of(two_arms()))
    [line] = [line for line in text.splitlines() if line.startswith("| sidecar-cpu | 0.800 (0.800..0.800)")]
    assert line.split("|")[3].strip() == "80 (40..80)"
    assert "3 rounds, interleaved, of 5 asked." in text
    assert "| mps-low | there is no GPU |" in text
    assert "Outputs right in every window" in text
    assert "**Outputs wrong** in sidecar-cpu" in page(results_of(two_arms(batch={"digest": "x"})))


def test_the_tables_of_the_page_fit_a_terminal_and_are_straight() -> None:
    measured = page(results_of(two_arms())).partition("### ")[2].partition("Outputs right")[0]
    tables = re.findall(r"(?:^\|.*\n)+", measured, re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        assert "sidecar-cpu" in table
        [width] = {len(line) for line in table.splitlines()}
        assert width <= 100


def test_the_exit_status_tells_wrong_outputs() -> None:
    assert right(results_of(two_arms()))
    assert not right(results_of(two_arms(batch={"digest": "x"})))
    assert not right({"sessions": []})
    broken = results_of(two_arms())
    broken["sessions"][0]["failed"] = "the engine has ended"
    assert not right(broken)


def test_a_session_without_a_whole_round_has_a_page_and_a_picture(tmp_path: Any) -> None:
    results = results_of([])
    assert "## Task A" in page(results)
    draw(results["sessions"], "", tmp_path / "empty.png")


def test_the_picture_is_drawn(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    png = draw(results_of(two_arms())["sessions"], "a machine", tmp_path / "x" / "y.png")
    assert png.read_bytes().startswith(b"\x89PNG")
